#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "engine/fixture.h"
#include "trainer/decode/check.h"
#include "trainer/decode/decoder.h"

using namespace gdn;
using namespace gdn::trainer;
using config::LayerKind;
using config::MlpKind;

namespace {

// A session for check_decode, its weights larger than at the start of training so that every path counts.
struct Prepared {
  config::Model model;
  config::Run run;
  CpuDevice device;
  Session session;
  Prepared(config::Model m, const char* stack) : Prepared(std::move(m), [&] {
    config::Run r;
    r.stack = stack;
    return decode_check_run(r);
  }()) {}
  Prepared(config::Model m, config::Run r) : model(std::move(m)), run(std::move(r)), session(model, run, device) {
    session.parameters().initialise(11);
    for (const ParameterSlot& s : session.parameters().slots()) {
      std::vector<float> w = session.parameters().weights(s.name());
      const bool matrix = s.parameter->shape.size() > 1;
      const reference::RandomStream random{.seed = 5, .op = reference::stream_id(s.name().data(), s.name().size())};
      for (size_t i = 0; i < w.size(); ++i) w[i] = matrix ? 6 * w[i] : w[i] + 0.2f * static_cast<float>(random.normal(i));
      session.parameters().set_weights(s.name(), w);
    }
    session.use({});
  }
};

void all_agree(config::Model model, const char* stack) {
  Prepared p(std::move(model), stack);
  const std::vector<DecodeCase> cases = check_decode(p.session);
  CHECK(cases.size() == 34);
  double most = 0;
  for (const DecodeCase& c : cases) {
    INFO(stack << ": " << c.lengths << ", " << c.split);
    CHECK(c.ok());
    CHECK(c.allowed == 1e-5);
    most = std::max(most, c.off);
  }
  CHECK(most > 0); // other arithmetic than the full forward's
}

config::Model hybrid_with_gdn2() { return fixture::model({LayerKind::Gdn, LayerKind::Gdn2, LayerKind::Attention}, {MlpKind::Moe, MlpKind::Dense, MlpKind::Moe}); }

std::vector<std::int64_t> ids(std::int64_t n, std::uint64_t seed, std::int64_t vocab) {
  const reference::RandomStream random{.seed = seed};
  std::vector<std::int64_t> out;
  for (std::int64_t i = 0; i < n; ++i) out.push_back(static_cast<std::int64_t>(random.bits(static_cast<std::uint64_t>(i)) % static_cast<std::uint64_t>(vocab)));
  return out;
}

double difference(const std::vector<float>& a, const std::vector<float>& b) {
  REQUIRE(a.size() == b.size());
  double most = 0, largest = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    most = std::max(most, std::abs(static_cast<double>(a[i]) - b[i]));
    largest = std::max(largest, std::abs(static_cast<double>(b[i])));
  }
  return most / largest;
}

} // namespace

TEST_CASE("decode: every length and split is the full forward, native") { all_agree(hybrid_with_gdn2(), "native"); }
TEST_CASE("decode: every length and split is the full forward, megatron") { all_agree(hybrid_with_gdn2(), "megatron"); }
TEST_CASE("decode: a norm over all heads, no gate, other taps") {
  config::Model m = hybrid_with_gdn2();
  m.attention.whole_vector_qk_norm = true;
  m.attention.output_gate = false;
  m.gdn.conv_kernel = 3;
  m.gdn.conv_bias = true;
  all_agree(m, "native");
}

TEST_CASE("decode: in bf16 every way is as near to fp32 as the full forward") {
  config::Run r;
  r.stack = "native";
  config::Model m = fixture::model({LayerKind::Gdn, LayerKind::Gdn2, LayerKind::Attention}, {MlpKind::Dense, MlpKind::Dense, MlpKind::Dense});
  Prepared p(std::move(m), decode_check_run(r, DType::BF16));
  const std::vector<DecodeCase> cases = check_decode(p.session);
  CHECK(cases.size() == 35); // the full forward is one of them
  for (const DecodeCase& c : cases) {
    INFO(c.lengths << ", " << c.split);
    CHECK(c.ok());
    CHECK(c.allowed < 0.1);
    CHECK(c.off > 1e-4); // bf16 shows
  }
}

TEST_CASE("decode: a draft that is not accepted leaves no trace") {
  Prepared p(hybrid_with_gdn2(), "native");
  Decoder plain(p.model, p.run, p.device, p.session.parameters(), 2, 32), drafted(p.model, p.run, p.device, p.session.parameters(), 2, 32);
  const std::vector<std::int64_t> prompt = ids(9, 1, p.model.vocab), other = ids(6, 2, p.model.vocab), next = ids(5, 3, p.model.vocab);
  for (Decoder* d : {&plain, &drafted}) d->append(std::vector<NewTokens>{{1, prompt}, {0, other}});
  // The draft: three right tokens and two wrong ones for slot 1, one for slot 0.
  std::vector<std::int64_t> draft = next;
  draft[3] = (draft[3] + 1) % p.model.vocab;
  draft[4] = (draft[4] + 1) % p.model.vocab;
  const std::vector<float> guessed = drafted.append_draft(std::vector<NewTokens>{{0, {other[0]}}, {1, draft}});
  drafted.rewind(1, 3);
  CHECK(drafted.pool().length(1) == 12);
  CHECK(drafted.pool().length(0) == 7);
  const std::vector<float> known = plain.append(std::vector<NewTokens>{{1, {next[0], next[1], next[2]}}, {0, {other[0]}}});
  const auto vocab = static_cast<std::ptrdiff_t>(p.model.vocab);
  CHECK(difference({guessed.begin() + vocab, guessed.begin() + 4 * vocab}, {known.begin(), known.begin() + 3 * vocab}) < 1e-5);
  const std::vector<NewTokens> rest{{1, {next[3], next[4]}}, {0, {other[1]}}};
  CHECK(difference(drafted.append(rest), plain.append(rest)) < 1e-5);
  CHECK_THROWS_WITH_AS(drafted.rewind(1, 1), doctest::Contains("the last pass was no draft"), Error);
  drafted.append_draft(rest);
  CHECK_THROWS_WITH_AS(drafted.rewind(1, 3), doctest::Contains("3 accepted of 2 tokens"), Error);
}

TEST_CASE("decode: states of a request do not depend on how its tokens came, nor on its neighbours") {
  Prepared p(hybrid_with_gdn2(), "native");
  Decoder whole(p.model, p.run, p.device, p.session.parameters(), 1, 70), pieces(p.model, p.run, p.device, p.session.parameters(), 3, 70);
  const std::vector<std::int64_t> prompt = ids(70, 4, p.model.vocab), noise = ids(70, 5, p.model.vocab);
  whole.append(std::vector<NewTokens>{{0, prompt}});
  pieces.append(std::vector<NewTokens>{{2, noise}, {1, {prompt.begin(), prompt.begin() + 65}}, {0, {}}});
  for (size_t t = 65; t < 70; ++t) pieces.append(std::vector<NewTokens>{{1, {prompt[t]}}});
  for (std::int64_t layer = 0; layer < p.model.layers(); ++layer) {
    const SequenceStates &a = whole.pool().layer(layer), &b = pieces.pool().layer(layer);
    for (auto [one, many] : {std::pair{a.conv, b.conv}, {a.recurrent, b.recurrent}, {a.keys, b.keys}, {a.values, b.values}}) {
      if (!one) continue;
      const std::int64_t n = one.rows * one.cols;
      const auto *x = reinterpret_cast<const float*>(one.data), *y = reinterpret_cast<const float*>(many.data) + n; // slot 1
      INFO("layer " << layer << ", " << one.rows << " x " << one.cols);
      CHECK(difference({y, y + n}, {x, x + n}) < 1e-5);
    }
  }
  // A slot that is used again starts from nothing.
  Decoder fresh(p.model, p.run, p.device, p.session.parameters(), 3, 70);
  pieces.pool().reset(2);
  const std::vector<NewTokens> again{{2, {prompt.begin(), prompt.begin() + 7}}};
  CHECK(pieces.append(again) == fresh.append(again));
}

TEST_CASE("decode: the pool, by hand") {
  const config::Model m = hybrid_with_gdn2();
  config::Run run;
  run.dtype = DType::BF16;
  CpuDevice device;
  const StatePool pool(m, run, device, 3, 10);
  // GDN and GDN2: channels 2 * 32 + 64 = 128 of 4 taps in bf16, states 4 * 16 x 16 in fp32; attention: 10 rows of 2 * 16, twice.
  const Bytes conv = 3 * 128 * 4 * 2, recurrent = 3 * 64 * 16 * 4, cache = 3 * 10 * 32 * 2;
  CHECK(pool.bytes() == 2 * (conv + recurrent) + 2 * round_up(cache, 256));
  CHECK(pool.layer(0).conv.rows == 3 * 128);
  CHECK(pool.layer(1).recurrent.rows == 3 * 64);
  CHECK(pool.layer(1).recurrent.dtype == DType::FP32);
  CHECK(pool.layer(2).keys.rows == 30);
  CHECK(!pool.layer(2).conv);
}

TEST_CASE("decode: what is not decoded is said") {
  Prepared p(fixture::hybrid(), "native");
  Decoder d(p.model, p.run, p.device, p.session.parameters(), 2, 4);
  auto refused = [&](std::vector<NewTokens> requests, const char* why) { CHECK_THROWS_WITH_AS(d.append(requests), doctest::Contains(why), Error); };
  refused({}, "no request has a token");
  refused({{0, {}}, {1, {}}}, "no request has a token");
  refused({{2, {1}}}, "slot 2; slots are 0 to 1");
  refused({{1, {1}}, {1, {2}}}, "slot 1 is named twice");
  refused({{0, {1, 2, 3, 4, 5}}}, "has 0 tokens and 5 more come; a slot holds 4");
  refused({{0, {128}}}, "token id 128; ids are 0 to 127");
  CHECK(d.pool().length(0) == 0); // nothing was taken in
  d.append(std::vector<NewTokens>{{0, {1, 2, 3}}});
  refused({{0, {1, 2}}}, "has 3 tokens and 2 more come");
  auto run_refused = [&](auto change, const char* why) {
    config::Run run = p.run;
    change(run);
    CHECK_THROWS_WITH_AS(Decoder(p.model, run, p.device, p.session.parameters(), 1, 1), doctest::Contains(why), Error);
  };
  run_refused([](config::Run& r) { r.moe_capacity_factor = 1.5; }, "moe_expert_capacity_factor");
  run_refused([](config::Run& r) { r.moe_router_force_load_balancing = true; }, "moe_router_force_load_balancing");
  run_refused([](config::Run& r) { r.parallel.tp = r.parallel.gpus = 2; }, "one rank");
  CHECK_THROWS_WITH_AS(Decoder(p.model, p.run, p.device, p.session.parameters(), 0, 4), doctest::Contains("0 slots"), Error);
}
