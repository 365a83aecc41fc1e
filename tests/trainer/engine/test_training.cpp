#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>

#include <doctest/doctest.h>
#include <fmt/core.h>
#include <unistd.h>

#include "core/error.h"
#include "fixture.h"
#include "kernels/describe/own.h"
#include "trainer/data.h"
#include "trainer/step_profile.h"
#include "trainer/sweep.h"
#include "trainer/training.h"

using namespace gdn;
using namespace gdn::trainer;
namespace fs = std::filesystem;

namespace {

fs::path scratch_folder(const std::string& name) {
  const fs::path p = fs::temp_directory_path() / fmt::format("gdn_{}_{}", name, getpid());
  fs::remove_all(p);
  fs::create_directories(p);
  return p;
}

std::string example() { return std::string(std::getenv("GDN_EXAMPLES")) + "/tiny.yaml"; }

Setup small_example(std::vector<config::Setting> more = {}) {
  std::vector<config::Setting> s{{"seq_length", "48"}, {"global_batch_size", "2"}, {"train.steps", "30"}, {"train.warmup_steps", "2"}};
  s.insert(s.end(), more.begin(), more.end());
  return load_setup(example(), s);
}

std::vector<StepRecord> train(const Setup& s, std::vector<float>* weights = nullptr) {
  CpuDevice device;
  Session session(s.profile.model, s.profile.run, device);
  session.use(s.setting);
  const auto tokens = open_tokens(s.train, s.folder(), s.profile.model.vocab, s.profile.run);
  Training training(session, s.train, *tokens);
  std::vector<StepRecord> out;
  while (!training.finished()) out.push_back(training.step());
  if (weights) *weights = session.parameters().weights("layers.0.gdn.in_proj");
  return out;
}

std::string message_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

void write(const fs::path& p, const std::string& bytes) { std::ofstream(p, std::ios::binary) << bytes; }

} // namespace

TEST_CASE("the tiny example learns byte text") {
  const auto steps = train(small_example());
  CHECK(steps.front().result.loss == doctest::Approx(std::log(256.0)).epsilon(0.02));
  CHECK(steps.back().result.loss < 0.7 * std::log(256.0));
  CHECK(steps.front().warm_up);
  CHECK(!steps.back().warm_up);
}

TEST_CASE("recompute changes no bit of a whole training run") {
  std::vector<std::vector<float>> weights;
  for (const char* modules : {"[]", "gdn_qkv, gdn_norm_out, moe", "moe_act, shared_experts"}) {
    weights.emplace_back();
    train(small_example({{"recompute_modules", modules}, {"train.steps", "4"}}), &weights.back());
  }
  CHECK(weights[1] == weights[0]);
  CHECK(weights[2] == weights[0]);
}

TEST_CASE("learning rate: warm-up, then down to the last step") {
  config::Train t;
  t.steps = 11;
  t.lr = 1;
  t.min_lr = 0.5;
  t.warmup_steps = 2;
  t.lr_decay = "linear";
  CHECK(t.learning_rate(1) == 0.5);
  CHECK(t.learning_rate(2) == 1);
  CHECK(t.learning_rate(3) == 1);
  CHECK(t.learning_rate(7) == doctest::Approx(0.75));
  CHECK(t.learning_rate(11) == 0.5);
  t.lr_decay = "cosine";
  CHECK(t.learning_rate(7) == doctest::Approx(0.75));
  CHECK(t.learning_rate(11) == doctest::Approx(0.5));
  t.lr_decay = "constant";
  CHECK(t.learning_rate(9) == 1);
}

TEST_CASE("token files: bytes, uint16, uint32, and what is wrong with one") {
  const fs::path folder = scratch_folder("data");
  config::Train t;
  t.data = "text";
  t.data_path = "a.txt";
  write(folder / "a.txt", "abcdefgh");
  Batch b = open_tokens(t, folder, 256, 7)->batch(0, 0, 1, 7);
  CHECK(b.ids == std::vector<std::int64_t>{97, 98, 99, 100, 101, 102, 103});
  CHECK(b.labels == std::vector<std::int64_t>{98, 99, 100, 101, 102, 103, 104});
  CHECK(message_of([&] { open_tokens(t, folder, 256, 8); }).find("8 tokens, but one sequence needs 9") != std::string::npos);
  CHECK(message_of([&] { open_tokens(t, folder, 100, 7); }).find("token 3 is 100") != std::string::npos);
  t.data_path = "missing.txt";
  CHECK(message_of([&] { open_tokens(t, folder, 256, 7); }).find("missing.txt") != std::string::npos);

  t.data = "tokens";
  t.data_path = "t.bin";
  write(folder / "t.bin", std::string("\x01\x00\x00\x00\x02\x01\x00\x00", 8));
  t.data_dtype = "uint32";
  b = open_tokens(t, folder, 1000, 1)->batch(0, 0, 1, 1);
  CHECK(b.ids == std::vector<std::int64_t>{1});
  CHECK(b.labels == std::vector<std::int64_t>{258});
  t.data_dtype = "uint16";
  b = open_tokens(t, folder, 1000, 3)->batch(0, 0, 1, 3);
  CHECK(b.labels == std::vector<std::int64_t>{0, 258, 0});
  write(folder / "t.bin", "abc");
  CHECK(message_of([&] { open_tokens(t, folder, 1000, 1); }).find("no whole number") != std::string::npos);
  fs::remove_all(folder);
}

TEST_CASE("token files: an id beyond the vocabulary is named with its position, however large") {
  const fs::path folder = scratch_folder("ids");
  config::Train t;
  t.data = "tokens";
  t.data_path = "t.bin";
  t.data_dtype = "uint32";
  write(folder / "t.bin", std::string("\x01\x00\x00\x00\xff\xff\xff\xff", 8));
  CHECK(message_of([&] { open_tokens(t, folder, 1000, 1); }).find("token 1 is 4294967295, but the vocabulary ends at 999") != std::string::npos);
  fs::remove_all(folder);
}

TEST_CASE("packed documents: rows of whole documents, no label crosses from one to the next") {
  const fs::path folder = scratch_folder("packed");
  config::Train t;
  t.data = "text";
  t.data_path = "a.txt";
  write(folder / "a.txt", "\n\nabc\nd\n\n\nef\n\ng\n");
  const Batch b = open_tokens(t, folder, 256, 5, true)->batch(0, 0, 2, 5); // one row of 10 tokens
  const std::string text(b.ids.begin(), b.ids.end());
  CHECK(std::string("abc\ndefgabc\ndefgabc\ndefg").find(text) != std::string::npos); // in this order, from any of them on
  CHECK(b.ids.size() == 10);
  REQUIRE(b.sequences.front() == 0);
  CHECK(b.sequences.back() == 10);
  check_batch(b, 10, 256);
  for (size_t d = 0; d + 1 < b.sequences.size(); ++d)
    for (std::int64_t i = b.sequences[d]; i < b.sequences[d + 1]; ++i) {
      const auto at = static_cast<size_t>(i);
      if (i + 1 < b.sequences[d + 1]) CHECK(b.labels[at] == b.ids[at + 1]);
      else if (i + 1 < 10) CHECK(b.labels[at] == -100);
    }

  t.data = "tokens";
  t.data_path = "t.bin";
  write(folder / "t.bin", std::string("\x05\x00\x06\x00\x00\x00\x07\x00\x00\x00\x08\x00", 12)); // 5 6 0 | 7 0 | 8
  CHECK(message_of([&] { open_tokens(t, folder, 100, 6, true); }).find("train.eod_id") != std::string::npos);
  t.eod_id = 0;
  for (std::uint64_t step = 0; step < 4; ++step) {
    const Batch row = open_tokens(t, folder, 100, 6, true)->batch(step, 0, 1, 6);
    for (size_t i = 0; i < 6; ++i) {
      const bool last = std::find(row.sequences.begin(), row.sequences.end(), static_cast<std::int64_t>(i + 1)) != row.sequences.end();
      if (row.ids[i] == 0) CHECK((last && row.labels[i] == -100)); // the end of a document is predicted, and predicts nothing
      if (row.ids[i] == 6) CHECK((i == 5 || row.labels[i] == 0));
    }
  }
  fs::remove_all(folder);
}

TEST_CASE("packed documents: a run on them trains on labels inside documents alone") {
  const Setup s = small_example({{"packed", "true"}, {"micro_batch_size", "1"}, {"train.steps", "3"}, {"train.data", "synthetic"}, {"train.data_path", ""}});
  const auto steps = train(s);
  CHECK(std::isfinite(steps.back().result.loss));
  CHECK(steps.front().result.valid < steps.front().result.tokens); // last tokens of documents have no label
}

TEST_CASE("packed documents: the most that a row can have is known before the first step") {
  const fs::path folder = scratch_folder("most");
  config::Train t;
  t.data = "tokens";
  t.data_path = "t.bin";
  t.eod_id = 0;
  std::string bytes; // documents of 1 to 9 tokens, many of a length together
  std::int64_t tokens = 0;
  for (int length : {1, 1, 1, 7, 2, 2, 9, 9, 3, 1, 1, 5}) {
    for (int i = 1; i < length; ++i) bytes += std::string("\x05\x00", 2);
    bytes += std::string("\x00\x00", 2);
    tokens += length;
  }
  write(folder / "t.bin", bytes);
  const auto source = open_tokens(t, folder, 100, 1, true);
  for (std::int64_t row : {std::int64_t{1}, std::int64_t{2}, std::int64_t{3}, std::int64_t{10}, tokens - 1, tokens, tokens + 1, 2 * tokens, 3 * tokens + 4}) {
    size_t most = 0;
    for (std::uint64_t step = 0; step < 300; ++step) most = std::max(most, source->batch(step, 0, 1, row).sequences.size() - 1); // every start
    CAPTURE(row);
    CHECK(source->most_documents(row) == static_cast<std::int64_t>(most));
  }
  // 3 tokens from the first document on are three documents.
  config::Run run = fixture::run();
  run.settings.packed = true;
  run.seq = 10;
  run.max_documents = 4; // 1 + 1 + 1 + 7, but 1 + 1 + 5 + 1 + 1 + 1
  const std::string refused = message_of([&] { open_tokens(t, folder, 100, run); });
  CHECK(refused.find("a micro-batch of 10 tokens can have 6 documents (tokens t.bin") != std::string::npos);
  CHECK(refused.find("max_documents is 4") != std::string::npos);
  run.max_documents = 6;
  CHECK(open_tokens(t, folder, 100, run) != nullptr);
  run.max_documents.reset(); // as many as tokens
  CHECK(open_tokens(t, folder, 100, run) != nullptr);
  // Chat turns of 20 tokens: more than one for every 64.
  bytes.clear();
  for (int turn = 0; turn < 50; ++turn) {
    for (int i = 1; i < 20; ++i) bytes += std::string("\x05\x00", 2);
    bytes += std::string("\x00\x00", 2);
  }
  write(folder / "t.bin", bytes);
  run.seq = 4096;
  CHECK(message_of([&] { open_tokens(t, folder, 100, run); }).find("can have 205 documents") != std::string::npos); // 204.8
  CHECK(message_of([&] { open_tokens(t, folder, 100, run); }).find("max_documents is 64 where it is not given") != std::string::npos);
  run.max_documents = 205;
  CHECK(open_tokens(t, folder, 100, run) != nullptr);
  fs::remove_all(folder);
}

TEST_CASE("packed documents: the examples run, laid out for a GPU") {
  for (const char* example : {"tiny", "tiny-native"}) {
    const Setup s = load_setup(fs::path(std::getenv("GDN_EXAMPLES")) / (std::string(example) + ".yaml"), {{"packed", "true"}, {"micro_batch_size", "1"}, {"train.steps", "2"}});
    CAPTURE(example);
    CpuDevice device;
    const auto tokens = open_tokens(s.train, s.folder(), s.profile.model.vocab, s.profile.run);
    Session session(s.profile.model, s.profile.run, device, std::numeric_limits<Bytes>::max(), &kernels::own_provider());
    session.use(s.setting);
    Training training(session, s.train, *tokens);
    CHECK(std::isfinite(training.step().result.loss));
  }
}

TEST_CASE("a loss that is not finite ends the run: the step, the last finite loss, a hint") {
  const Setup s = small_example({{"params_dtype", "fp32"}});
  CpuDevice device;
  Session session(s.profile.model, s.profile.run, device);
  session.use(s.setting);
  const auto tokens = open_tokens(s.train, s.folder(), s.profile.model.vocab, s.profile.run.seq);
  Training training(session, s.train, *tokens);
  training.step();
  std::vector<float> w = session.parameters().weights("embedding.word");
  std::fill(w.begin(), w.end(), std::numeric_limits<float>::infinity());
  session.parameters().set_weights("embedding.word", w);
  try {
    training.step();
    FAIL("an infinite weight went unnoticed");
  } catch (const Error& e) {
    CHECK(e.code() == ErrorCode::Numeric);
    CHECK(std::string(e.what()).find("step 2: the loss is") != std::string::npos);
    CHECK(std::string(e.what()).find("the last finite loss was") != std::string::npos);
    CHECK(std::string(e.hint()).find("train.lr") != std::string::npos);
  }
}

TEST_CASE("a batch depends on step and micro-batch alone") {
  config::Train t;
  const auto a = open_tokens(t, ".", 50, 16), b = open_tokens(t, ".", 50, 16);
  CHECK(a->batch(3, 1, 2, 16).ids == b->batch(3, 1, 2, 16).ids);
  CHECK(a->batch(3, 1, 2, 16).ids != a->batch(3, 0, 2, 16).ids);
  CHECK(a->batch(3, 1, 2, 16).ids != a->batch(4, 1, 2, 16).ids);
}

TEST_CASE("packed input: offsets that do not fit are named") {
  const config::Run r = fixture::run();
  Batch b;
  b.ids.assign(128, 1);
  b.labels.assign(128, 2);
  auto check = [&](std::vector<std::int64_t> offsets) {
    b.sequences = std::move(offsets);
    return message_of([&] { check_batch(b, 128, 64); });
  };
  CHECK(check({0, 29, 77, 128}).empty());
  const std::string shorter = check({0, 29, 77, 120});
  CHECK(shorter.find("120") != std::string::npos);
  CHECK(shorter.find("128") != std::string::npos);
  CHECK(check({0, 64, 64, 128}).find("strictly increase") != std::string::npos);
  b.ids[5] = 64;
  CHECK(check({0, 128}).find("token 5 has id 64") != std::string::npos);
}

TEST_CASE("packed input: as many documents as the run has room for, on every device") {
  config::Run r = fixture::run();
  r.settings.packed = true;
  r.max_documents = 3;
  const config::Model m = fixture::hybrid();
  CpuDevice device;
  auto step = [&](std::vector<std::int64_t> offsets) {
    Session session(m, r, device);
    session.parameters().initialise(9);
    session.use({});
    std::vector<Batch> batches = fixture::batches(m, r);
    batches[0].sequences = std::move(offsets);
    return message_of([&] { session.run(batches); });
  };
  CHECK(step({0, 1, 2, 80}).empty());
  CHECK(step({0, 1, 2, 3, 80}).find("micro-batch 0 has 4 documents, max_documents is 3") != std::string::npos);
  r.max_documents = 4;
  CHECK(step({0, 1, 2, 3, 80}).empty());
  r.settings.packed = false;
  r.max_documents.reset();
  CHECK(step({0, 40, 80}).find("micro-batch 0 has 2 sequences, micro_batch_size is 1") != std::string::npos);
}

TEST_CASE("packed sequences leave the layers as each would alone") {
  for (const char* stack : {"megatron", "native"}) {
    config::Model m = fixture::hybrid();
    auto traced = [&](std::int64_t first, std::vector<std::int64_t> offsets) {
      config::Run r = fixture::run();
      r.stack = stack;
      r.seq = offsets.back();
      r.settings.packed = true;
      config::Run whole = fixture::run();
      const Batch all = fixture::batches(m, whole)[0];
      Batch b;
      b.ids.assign(all.ids.begin() + first, all.ids.begin() + first + r.seq);
      b.labels.assign(all.labels.begin() + first, all.labels.begin() + first + r.seq);
      b.sequences = std::move(offsets);
      CpuDevice device;
      Session s(m, r, device);
      s.parameters().initialise(9);
      s.use({});
      return run_traced(s, b);
    };
    const Trace packed = traced(0, {0, 3, 68, 80}), first = traced(0, {0, 3}), second = traced(3, {0, 65}), third = traced(68, {0, 12});
    REQUIRE(packed.hidden.size() == m.mixers.size() + 1);
    for (size_t layer = 0; layer < packed.hidden.size(); ++layer) {
      std::vector<float> joined;
      for (const Trace* t : {&first, &second, &third}) joined.insert(joined.end(), t->hidden[layer].begin(), t->hidden[layer].end());
      CAPTURE(stack);
      CAPTURE(layer);
      CHECK(packed.hidden[layer] == joined);
    }
  }
}

TEST_CASE("initial weights: A_init_range, conv_init, dt_bias, and nothing infinite") {
  config::Model m = fixture::hybrid();
  m.gdn.key_heads = 48;
  m.gdn.value_heads = 1152 / 2;
  m.gdn.key_head_dim = m.gdn.value_head_dim = 2;
  m.gdn.conv_bias = true;
  auto weights = [&](const char* name, std::uint64_t seed) {
    config::Run r = fixture::run();
    r.stack = "native"; // A_log in fp32
    CpuDevice device;
    Session session(m, r, device);
    session.parameters().initialise(seed);
    return session.parameters().weights(name);
  };
  for (std::uint64_t seed = 0; seed < 5; ++seed) {
    m.gdn.a_init_lo = 0; // an A of 0 would be a head that never forgets, for good
    for (const char* layer : {"layers.0.gdn.A_log", "layers.1.gdn.A_log"})
      for (float a : weights(layer, seed)) CHECK(std::isfinite(a));
    m.gdn.a_init_lo = 2;
    m.gdn.a_init_hi = 3;
    double lowest = 10, highest = -10;
    for (float a : weights("layers.0.gdn.A_log", seed)) {
      lowest = std::min<double>(lowest, a);
      highest = std::max<double>(highest, a);
    }
    CHECK(lowest >= std::log(2.0) - 1e-6);
    CHECK(highest <= std::log(3.0) + 1e-6);
    CHECK(highest - lowest > 0.35); // of log(3/2) = 0.405
  }
  for (float b : weights("layers.0.gdn.dt_bias", 1)) CHECK(b == 1);
  auto largest = [](const std::vector<float>& v) {
    float top = 0;
    for (float x : v) top = std::max(top, std::abs(x));
    return top;
  };
  CHECK(largest(weights("layers.0.gdn.conv1d", 1)) == doctest::Approx(0.5).scale(0).epsilon(0.01)); // 1 / sqrt(4 taps)
  m.gdn.conv_init = 0.02;
  CHECK(largest(weights("layers.0.gdn.conv1d", 1)) == doctest::Approx(0.02).scale(0).epsilon(0.01));
  CHECK(largest(weights("layers.0.gdn.conv1d.bias", 1)) == doctest::Approx(0.5).scale(0).epsilon(0.01));
}

TEST_CASE("sweep: every setting, equal programs once, resumed where it stopped") {
  const fs::path folder = scratch_folder("sweep");
  const Setup s = small_example({{"seq_length", "16"}, {"num_hidden_layers", "2"}, {"full_attention_interval", "2"}, {"micro_batch_size", "1"}});
  const auto tokens = open_tokens(s.train, s.folder(), s.profile.model.vocab, s.profile.run.seq);
  auto sweep = [&](size_t stop_after, const Setup& setup) {
    CpuDevice device;
    Session session(setup.profile.model, setup.profile.run, device);
    Sweep sweep(session, setup, *tokens, {.repeats = 1});
    size_t done = 0;
    return sweep.run(folder / "sweep.yaml", [&](const SweepRow&, size_t, size_t) { ++done; }, [&] { return done >= stop_after; });
  };
  const auto part = sweep(5, s);
  CHECK(part.size() == 5);
  const auto all = sweep(100000, s);
  CHECK(all.size() > 64);
  size_t resumed = 0;
  for (const SweepRow& r : all) {
    CAPTURE(r.setting);
    CHECK(r.measured_peak == r.predicted_peak);
    CHECK(r.identical);
    CHECK(r.measured_seconds > 0);
    resumed += r.resumed;
  }
  CHECK(resumed >= 5);
  std::string text;
  {
    std::ifstream in(folder / "sweep.yaml");
    text.assign(std::istreambuf_iterator<char>(in), {});
  }
  size_t written = 0; // each setting once
  for (size_t at = text.find("- modules:"); at != std::string::npos; at = text.find("- modules:", at + 1)) ++written;
  CHECK(written == all.size());
  write(folder / "sweep.yaml", text.substr(0, text.size() - 25)); // in the middle of a value
  CHECK(message_of([&] { sweep(1, s); }).find("no whole sweep can be read from it") != std::string::npos);
  write(folder / "sweep.yaml", text);
  CHECK(message_of([&] { sweep(1, small_example()); }).find("another configuration") != std::string::npos);
  fs::remove_all(folder);
}

TEST_CASE("what a layer keeps, measured, is what its summary predicts") {
  for (const char* stack : {"megatron", "native"}) {
    CpuDevice device;
    config::Run run = fixture::run();
    run.stack = stack;
    Session s(fixture::hybrid(), run, device);
    s.parameters().initialise(1);
    const plan::Setting setting = fixture::modules(std::string(stack) == "native" ? std::vector<std::string>{"moe_fc1"}
                                                                                  : std::vector<std::string>{"gdn_qkv"});
    s.use(setting);
    StepProfile profile(s);
    s.run(fixture::batches(s.model(), run), 0, 0, profile.observer());
    profile.step_done(false);
    config::ProfileSet set;
    profile.add_rows(set);
    size_t compared = 0;
    for (const model::Chunk& c : model::chunks_of_rank(s.model().layers(), run.parallel, 0))
      for (const plan::PlacedUnit& u : s.workload().units(c, setting)) {
        std::string kind = u.unit->list->name;
        std::replace(kind.begin(), kind.end(), '.', '+');
        CAPTURE(kind);
        const config::ProfileRow* row = set.find("layers." + kind + ".retained_bytes");
        REQUIRE(row != nullptr);
        CHECK(static_cast<Bytes>(row->value) == u.unit->summary.retained.total());
        REQUIRE(set.find("layers." + kind + ".forward_seconds") != nullptr);
        CHECK(set.find("layers." + kind + ".forward_seconds")->value > 0);
        ++compared;
      }
    CHECK(compared == 5);
    REQUIRE(set.find("ops.gdn+moe.in_proj.forward_seconds") != nullptr);
    CHECK(set.find("ops.gdn+moe.in_proj.forward_seconds")->value > 0);
  }
}

TEST_CASE("settings with equal programs have equal signatures") {
  const config::Run run = fixture::run(2);
  config::Model model = fixture::hybrid();
  model.mlps.assign(3, config::MlpKind::Moe);
  CpuDevice device;
  plan::Workload workload(model, run, device.provider());
  auto of = [&](std::vector<std::string> modules) { return signature(step_program(workload, fixture::modules(std::move(modules)), 2)); };
  CHECK(of({}) == of({"mlp"})); // no dense MLP to act on
  CHECK(of({}) != of({"moe"}));
  CHECK(of({"moe"}) != of({"moe", "moe_act"})); // nested: replayed twice
}

TEST_CASE("does not fit: the tensors, and the setting that would") {
  const Setup s = small_example({{"recompute_modules", "[]"}, {"seq_length", "128"}, {"micro_batch_size", "2"}});
  CpuDevice device;
  plan::Workload workload(s.profile.model, s.profile.run, device.provider());
  const program::Program program = step_program(workload, s.setting, 1);
  const Prediction p = predict(workload, s.setting, program);
  const std::string text = message_of([&] {
    Session session(s.profile.model, s.profile.run, device, p.total_bytes() - 1);
    session.use(s.setting);
  });
  CHECK(text.find(p.largest[0].first) != std::string::npos);
  CHECK(text.find("would fit with") != std::string::npos);
  const std::string none = message_of([&] {
    Session session(s.profile.model, s.profile.run, device, p.state.total() + 1000);
    session.use(s.setting);
  });
  const Fitting least = smallest_setting(workload);
  CHECK(none.find(fmt::format("the smallest, '{}', needs", least.setting)) != std::string::npos);
  CHECK(none.find("too many") != std::string::npos);
  const std::string hopeless = message_of([&] { Session session(s.profile.model, s.profile.run, device, 1000); });
  CHECK(hopeless.find("parameters, gradients and optimizer") != std::string::npos);
}

TEST_CASE("priced but not executed: refused by name") {
  CpuDevice device;
  auto refused = [&](void (*change)(config::Model&, config::Run&)) {
    config::Model m = fixture::hybrid();
    config::Run r = fixture::run();
    change(m, r);
    return message_of([&] {
      Session s(m, r, device);
      s.use({});
    });
  };
  CHECK(refused([](config::Model&, config::Run& r) { r.hidden_dropout = 0.1; }).find("dropout") != std::string::npos);
  CHECK(refused([](config::Model&, config::Run& r) { r.fused_attention = false; }).find("unfused core attention") != std::string::npos);
  CHECK(refused([](config::Model&, config::Run& r) { r.deterministic = true; }).find("deterministic") != std::string::npos);
  CHECK(refused([](config::Model&, config::Run& r) { r.parallel.tp = r.parallel.gpus = 2; }).find("one rank") != std::string::npos);
  CHECK(refused([](config::Model&, config::Run& r) { r.optimizer.precision_aware = true; }).find("precision_aware") != std::string::npos);
  CHECK(refused([](config::Model&, config::Run& r) { r.dtype = DType::FP16; }).find("fp16") != std::string::npos);
  CHECK(refused([](config::Model&, config::Run& r) { r.fp8_recipe = "tensorwise"; }).find("fp8") != std::string::npos);
  CHECK(refused([](config::Model&, config::Run& r) { r.cpu_offloading = true; }).find("offloading") != std::string::npos);
  CHECK(refused([](config::Model&, config::Run& r) { r.moe_capacity_factor = 1.0; }).find("capacity") != std::string::npos);
  CHECK(refused([](config::Model& m, config::Run& r) {
          m.vision = config::VisionShape{1, 16, 2, 16, 16};
          r.vision = config::VisionMode::Trained;
        }).find("vision tower") != std::string::npos);
}

TEST_CASE("the resolved configuration is the configuration") {
  const Setup s = small_example();
  const fs::path folder = scratch_folder("resolved");
  write(folder / "config.yaml", resolved_yaml(s));
  const Setup again = load_setup((folder / "config.yaml").string(), {});
  CHECK(resolved_yaml(again) == resolved_yaml(s));
  CHECK(again.setting.text() == s.setting.text());
  CHECK(message_of([&] { small_example({{"train.stepz", "3"}}); }).find("steps") != std::string::npos);
  fs::remove_all(folder);
}

TEST_CASE("every example with a train block runs") {
  size_t ran = 0;
  for (const auto& entry : fs::directory_iterator(std::getenv("GDN_EXAMPLES"))) {
    if (entry.path().extension() != ".yaml") continue;
    std::ifstream in(entry.path());
    const std::string text(std::istreambuf_iterator<char>(in), {});
    if (text.find("\ntrain:") == std::string::npos) continue; // for gdnplan alone
    CAPTURE(entry.path().string());
    const Setup s = load_setup(entry.path().string(), {{"train.steps", "2"}, {"seq_length", "16"}, {"micro_batch_size", "1"}, {"global_batch_size", "1"}});
    if (Parameters::bytes_of(model::static_state(s.profile.model, s.profile.run, 0)).total() > 4 * kGiB) continue; // for a GPU
    CHECK(std::isfinite(train(s).back().result.loss));
    ++ran;
  }
  CHECK(ran >= 2);
}

TEST_CASE("exit statuses of the program") {
  const std::string program = std::getenv("GDNTRAIN");
  const fs::path folder = scratch_folder("exit");
  auto status = [&](const std::string& arguments) {
    const int raw = std::system(fmt::format("{} {} >{}/out 2>{}/err", program, arguments, folder.string(), folder.string()).c_str());
    return WEXITSTATUS(raw);
  };
  auto said = [&](const char* file) {
    std::ifstream in(folder / file);
    return std::string(std::istreambuf_iterator<char>(in), {});
  };
  CHECK(status("run " + example() + " --dry-run") == 0);
  CHECK(said("out").find("Fits.") != std::string::npos);
  CHECK(status("run " + example() + " --dry-run --budget 1MiB") == 3);
  CHECK(status("run " + example() + " --dry-run --budget 20MiB --modules none --set micro_batch_size=4") == 3);
  // Of two pipeline ranks the last holds the logits: 43 MiB there, less than 38 on the first.
  CHECK(status("run " + example() + " --dry-run --budget 38MiB --set gpus=2 --set pipeline_model_parallel_size=2 --set vocab_size=8192") == 3);
  CHECK(said("out").find("Pipeline rank 1 of 2 needs most") != std::string::npos);
  CHECK(status("run " + example() + " --device cuda --dry-run") == 4);
  CHECK(status("run " + example() + " --dry-run --set seq_lenght=3") == 2);
  CHECK(said("err").find("seq_length") != std::string::npos);
  CHECK(status("run " + example() + " --dry-run --set fp4=true") == 2); // as the run itself
  CHECK(said("err").find("--set: fp4 = true is not executed") != std::string::npos);
  CHECK(said("out").find("Fits.") == std::string::npos);
  CHECK(status("sweep " + example() + " --set moe_input_jitter_eps=0.1") == 2);
  CHECK(status("check --set hidden_dropout=0.1") == 2);
  CHECK(status("run " + example() + " --dry-run --modules ''") == 2);
  CHECK(said("err").find("--modules none") != std::string::npos);
  CHECK(status("run " + example() + " --dry-run --set train.data_path=none.txt") == 2);
  CHECK(said("err").find("none.txt' is not there") != std::string::npos);
  CHECK(status("run " + example() + " --dry-run --steps 3") == 0);
  CHECK(said("err").find("the learning rate never reaches train.lr") != std::string::npos);
  CHECK(status("run " + example() + " --dry-run --modules gdn_qvk") == 2);
  CHECK(status("run nothing.yaml") == 2);
  CHECK(status("frobnicate") == 2);
  CHECK(status("--help") == 0);
  CHECK(status(fmt::format("run {} --steps 2 --set seq_length=16 -o {}", example(), folder.string())) == 0);
  CHECK(said("err").find("running on the CPU") != std::string::npos);
  CHECK(said("err").find("step 2/2 | loss") != std::string::npos);
  CHECK(said("out").find("predicted") != std::string::npos);
  for (const char* file : {"log.jsonl", "config.yaml", "profile.yaml"}) CHECK(fs::exists(folder / file));
  // Ctrl-C: the step is finished, the results are written, 130.
  const int raw = std::system(fmt::format("timeout --foreground --preserve-status -s INT 3 {} run {} --steps 100000 --set seq_length=16 -o {} >{}/out 2>{}/err", program,
                                          example(), folder.string(), folder.string(), folder.string()).c_str());
  CHECK(WEXITSTATUS(raw) == 130);
  CHECK(said("err").find("interrupted after step") != std::string::npos);
  CHECK(said("out").find("Outcome") != std::string::npos);
  fs::remove_all(folder);
}
