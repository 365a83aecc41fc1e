// Decoding on the GPU: attention over a cache against fp64; then the decoder through the op lists: every way to cut
// requests into passes against the full forward in fp32, recorded passes against launched ones bit by bit, drafts taken
// back. Ends with 77 (SKIP) without a device.
//   decoder_check [attention|models|bench]
#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>

#include "core/error.h"
#include "kernels/attention/decode_attention.h"
#include "tests/gpu/device.h"
#include "tests/trainer/engine/fixture.h"
#include "trainer/cuda/device.h"
#include "trainer/decode/check.h"
#include "trainer/decode/decoder.h"

using namespace gdn;
using namespace gdn::trainer;
using namespace gdn::gpu_test;
using config::LayerKind;
using config::MlpKind;

namespace {

int failures = 0;
void expect(bool ok, const char* what) {
  failures += !ok;
  if (!ok) std::printf(" %s FAILED", what);
}

// -------------------------------------------------------------------------- attention over a cache ----

struct Case {
  int heads, kv_heads, dim;
  std::vector<int> lengths; // keys that the tokens see; 0: nobody's token
};

std::vector<Bf16> random_values(std::size_t count, std::uint64_t seed, double size = 1) {
  Random random{seed};
  std::vector<Bf16> out(count);
  for (Bf16& x : out) x = to_bf16(static_cast<float>(size * random.normal()));
  return out;
}

struct Cache {
  explicit Cache(const Case& c)
      : capacity(*std::max_element(c.lengths.begin(), c.lengths.end()) + 3), tokens(static_cast<std::int64_t>(c.lengths.size())),
        width(std::int64_t{c.kv_heads} * c.dim) {
    const std::int64_t pool = 2 * tokens + 1;
    for (std::size_t t = 0; t < c.lengths.size(); ++t) {
      slots.push_back(c.lengths[t] == 0 ? -1 : static_cast<std::int32_t>((2 * t + 3) % static_cast<std::size_t>(pool)));
      positions.push_back(c.lengths[t] - 1);
    }
    host_keys = random_values(static_cast<std::size_t>(pool * capacity * width), 1);
    host_values = random_values(host_keys.size(), 2);
    keys = DeviceArray<Bf16>(host_keys);
    values = DeviceArray<Bf16>(host_values);
    device_slots = DeviceArray<std::int32_t>(slots);
    device_positions = DeviceArray<std::int32_t>(positions);
  }
  kernels::CachedTokens at() const { return {tokens, device_slots.get(), device_positions.get()}; }
  kernels::AttentionCache cache() const { return {keys.get(), values.get(), capacity}; }
  std::int64_t row(std::size_t token, std::int64_t key) const { return slots[token] * capacity + key; }

  std::int64_t capacity, tokens, width;
  std::vector<std::int32_t> slots, positions;
  std::vector<Bf16> host_keys, host_values;
  DeviceArray<Bf16> keys, values;
  DeviceArray<std::int32_t> device_slots, device_positions;
};

kernels::Matrix matrix(const DeviceArray<Bf16>& m, std::int64_t rows, std::int64_t cols, std::int64_t stride) {
  return {m.get(), DType::BF16, rows, cols, stride};
}

// Probabilities and outputs are rounded to bf16 once each: at most 2^-9 sqrt(2) together. Sums are fp32.
constexpr double kBf16Limit = 2.8e-3, kFp32Limit = 1e-5;

void check_attention(const Case& c) {
  Cache cache(c);
  const std::int64_t q_width = std::int64_t{c.heads} * c.dim, stride = q_width + 16; // rows are slices of wider ones
  const auto n = static_cast<std::size_t>(cache.tokens);
  const auto q = random_values(n * static_cast<std::size_t>(stride), 3), k = random_values(n * static_cast<std::size_t>(cache.width), 4),
             v = random_values(k.size(), 5);
  DeviceArray<Bf16> dq(q), dk(k), dv(v), o(n * static_cast<std::size_t>(q_width));
  DeviceArray<float> lse(n * static_cast<std::size_t>(c.heads));
  auto launch = [&](const kernels::LaunchContext& context) {
    kernels::append_to_cache(cache.at(), matrix(dk, cache.tokens, cache.width, cache.width), matrix(dv, cache.tokens, cache.width, cache.width), cache.cache(), context);
    kernels::decode_attention({cache.at(), c.heads, c.kv_heads, c.dim, matrix(dq, cache.tokens, q_width, stride),
                               matrix(o, cache.tokens, q_width, q_width), cache.cache(), lse.get()}, context);
  };
  launch({});
  GDN_CUDA(cudaDeviceSynchronize());
  const auto got = o.download();
  const auto got_lse = lse.download();
  for (std::size_t t = 0; t < n; ++t)
    if (cache.slots[t] >= 0)
      for (auto [from, to] : {std::pair{&k, &cache.host_keys}, {&v, &cache.host_values}})
        std::copy_n(from->begin() + static_cast<std::ptrdiff_t>(t) * cache.width, cache.width, to->begin() + cache.row(t, cache.positions[t]) * cache.width);
  const auto kept_keys = cache.keys.download(), kept_values = cache.values.download();
  expect(std::memcmp(kept_keys.data(), cache.host_keys.data(), kept_keys.size() * 2) == 0 &&
             std::memcmp(kept_values.data(), cache.host_values.data(), kept_values.size() * 2) == 0, "the cache");

  double error = 0, size = 0, lse_error = 0;
  for (std::size_t t = 0; t < n; ++t)
    for (int h = 0; h < c.heads; ++h) {
      const std::int64_t kv = h / (c.heads / c.kv_heads) * c.dim, keys = cache.slots[t] < 0 ? 0 : cache.positions[t] + 1;
      std::vector<double> scores, want(static_cast<std::size_t>(c.dim), 0);
      double most = -1e300, sum = 0;
      for (std::int64_t j = 0; j < keys; ++j) {
        double s = 0;
        for (int i = 0; i < c.dim; ++i)
          s += value(q[t * static_cast<std::size_t>(stride) + static_cast<std::size_t>(h * c.dim + i)]) * value(cache.host_keys[static_cast<std::size_t>(cache.row(t, j) * cache.width + kv + i)]);
        scores.push_back(s / std::sqrt(c.dim));
        most = std::max(most, scores.back());
      }
      for (double s : scores) sum += std::exp(s - most);
      for (std::int64_t j = 0; j < keys; ++j)
        for (int i = 0; i < c.dim; ++i)
          want[static_cast<std::size_t>(i)] += std::exp(scores[static_cast<std::size_t>(j)] - most) / sum * value(cache.host_values[static_cast<std::size_t>(cache.row(t, j) * cache.width + kv + i)]);
      for (int i = 0; i < c.dim; ++i) {
        error += std::pow(value(got[t * static_cast<std::size_t>(q_width) + static_cast<std::size_t>(h * c.dim + i)]) - want[static_cast<std::size_t>(i)], 2);
        size += std::pow(want[static_cast<std::size_t>(i)], 2);
      }
      const double x = got_lse[t * static_cast<std::size_t>(c.heads) + static_cast<std::size_t>(h)], y = keys == 0 ? 0 : most + std::log(sum);
      lse_error = std::max(lse_error, std::isnan(x) ? INFINITY : std::abs(x - y) / std::max(1.0, std::abs(y)));
    }
  const double relative = std::isnan(error) ? INFINITY : std::sqrt(error / size);
  std::printf("%2d/%d heads of %3d, %2zu tokens: o %.1e, log-sum-exp %.1e", c.heads, c.kv_heads, c.dim, n, relative, lse_error);
  expect(relative <= kBf16Limit, "o");
  expect(lse_error <= kFp32Limit, "log-sum-exp");
  // Again, and each token alone: the same bits.
  o.poison();
  launch({});
  GDN_CUDA(cudaDeviceSynchronize());
  expect(std::memcmp(got.data(), o.download().data(), got.size() * 2) == 0, "a second run");
  o.poison();
  for (std::int64_t t = 0; t < cache.tokens; ++t)
    kernels::decode_attention({{1, cache.device_slots.get() + t, cache.device_positions.get() + t}, c.heads, c.kv_heads, c.dim,
                               {dq.get() + t * stride, DType::BF16, 1, q_width, stride}, {o.get() + t * q_width, DType::BF16, 1, q_width, q_width}, cache.cache(), nullptr}, {});
  GDN_CUDA(cudaDeviceSynchronize());
  expect(std::memcmp(got.data(), o.download().data(), got.size() * 2) == 0, "tokens alone");
  expect(o.guard_intact() && lse.guard_intact() && cache.keys.guard_intact() && cache.values.guard_intact(), "guards");
  std::printf("\n");
  std::fflush(stdout); // under a checker a case takes long
}

void check_attention() {
  const std::vector<int> lengths{1, 2, 31, 0, 32, 33, 127, 128, 129, 500, 1031};
  for (const Case& c : {Case{4, 2, 32, lengths}, {2, 2, 64, lengths}, {6, 2, 64, lengths}, {4, 1, 72, lengths}, {8, 2, 128, lengths}, {16, 1, 128, {5, 700}},
                        {16, 2, 256, lengths}, {32, 2, 256, {1, 40, 333}}, {3, 3, 200, lengths}, {12, 1, 8, {7, 64}}, {16, 2, 256, {5000}}})
    check_attention(c);
}

// Median under graph replay beside the floor: keys and values read once, at the rate of a device copy.
void bench() {
  constexpr double kBandwidth = 4.2e12;
  std::printf("16 query and 2 kv heads of 256; us, floor = bytes of the cache / 4.2 TB/s\n%9s %8s %9s %9s %7s\n", "requests", "keys", "us", "floor", "ratio");
  for (const auto& [requests, keys] : {std::pair{1, 4096}, {1, 65536}, {8, 4096}, {8, 32768}, {64, 4096}, {64, 16384}, {256, 4096}}) {
    const Case c{16, 2, 256, std::vector<int>(static_cast<std::size_t>(requests), keys)};
    const std::int64_t width = 512, q_width = 4096;
    std::vector<std::int32_t> slots, positions(static_cast<std::size_t>(requests), keys - 1);
    for (int r = 0; r < requests; ++r) slots.push_back((r * 5 + 3) % requests);
    DeviceArray<std::int32_t> dslots(slots), dpositions(positions);
    DeviceArray<Bf16> k(static_cast<std::size_t>(requests * keys * width)), v(k.size()), q(random_values(static_cast<std::size_t>(requests * q_width), 1)), o(q.size());
    GDN_CUDA(cudaMemset(k.get(), 0, k.size() * 2));
    GDN_CUDA(cudaMemset(v.get(), 0, v.size() * 2));
    const Timing time = time_graph([&](cudaStream_t stream) {
      kernels::decode_attention({{requests, dslots.get(), dpositions.get()}, 16, 2, 256, matrix(q, requests, q_width, q_width), matrix(o, requests, q_width, q_width),
                                 {k.get(), v.get(), keys}, nullptr}, {.stream = stream});
    }, 30);
    const double floor = 1e6 * 4.0 * static_cast<double>(requests) * keys * width / kBandwidth;
    std::printf("%9d %8d %9.1f %9.1f %7.2f\n", requests, keys, 1e3 * time.median, floor, 1e3 * time.median / floor);
    std::fflush(stdout);
  }
}

// ---------------------------------------------------------------------------------------- decoder ----

config::Run run_of(const char* stack) {
  config::Run r;
  r.stack = stack;
  return decode_check_run(r, DType::BF16);
}

void weights_of(Session& session) { // larger than at the start of training, so that every path counts
  session.parameters().initialise(11);
  for (const ParameterSlot& s : session.parameters().slots()) {
    std::vector<float> w = session.parameters().weights(s.name());
    const bool is_matrix = s.parameter->shape.size() > 1;
    const reference::RandomStream random{.seed = 5, .op = reference::stream_id(s.name().data(), s.name().size())};
    for (size_t i = 0; i < w.size(); ++i) w[i] = is_matrix ? 3 * w[i] : w[i] + 0.2f * static_cast<float>(random.normal(i));
    session.parameters().set_weights(s.name(), w);
  }
}

// A draft of which only a part is accepted leaves the states of that part: what follows is what follows without it.
void check_draft(Session& session, CudaDevice& device, double allowed) {
  Decoder plain(session.model(), session.run_settings(), device, session.parameters(), 2, 32), drafted(session.model(), session.run_settings(), device, session.parameters(), 2, 32);
  const std::vector<std::int64_t> prompt{1, 5, 9, 2, 7, 30, 11}, next{3, 8, 4, 1, 6};
  for (Decoder* d : {&plain, &drafted}) d->append(std::vector<NewTokens>{{1, prompt}, {0, {4, 4}}});
  drafted.append_draft(std::vector<NewTokens>{{1, {next[0], next[1], next[2], 20, 21}}});
  drafted.rewind(1, 3);
  plain.append(std::vector<NewTokens>{{1, {next[0], next[1], next[2]}}});
  double off = 0, norm = 0;
  for (std::size_t t = 3; t < 5; ++t) {
    const std::vector<NewTokens> one{{1, {next[t]}}};
    const std::vector<float> a = drafted.append(one), b = plain.append(one);
    for (std::size_t i = 0; i < a.size(); ++i) {
      off += std::pow(static_cast<double>(a[i]) - static_cast<double>(b[i]), 2);
      norm += std::pow(static_cast<double>(b[i]), 2);
    }
  }
  const double relative = std::isnan(off) ? INFINITY : std::sqrt(off / norm);
  std::printf(", after a draft %.1e", relative);
  expect(relative <= allowed, "draft");
}

struct ModelCase {
  const char *name, *stack;
  config::Model model;
};

void check_model(const ModelCase& c, CudaDevice& device) {
  const config::Run run = run_of(c.stack);
  Session session(c.model, run, device);
  weights_of(session);
  session.use({});
  double worst = 0, allowed = 0;
  std::size_t wrong = 0, ways = 0;
  bool replayed = false;
  for (const DecodeCase& d : check_decode(session)) {
    ++ways;
    if (d.allowed == 0) replayed = d.ok();
    else worst = std::max(worst, d.off / d.allowed), allowed = d.allowed;
    if (d.ok()) continue;
    ++wrong;
    std::printf("  WRONG %s tokens, %s: off by %.1e, allowed %.1e\n", d.lengths.c_str(), d.split.c_str(), d.off, d.allowed);
  }
  std::printf("%-40s %zu ways, %zu wrong, the others up to %.2f of the allowed %.1e, replays %s", c.name, ways, wrong, worst, allowed, replayed ? "equal" : "DIFFERENT");
  expect(wrong == 0 && replayed, "decoding");
  check_draft(session, device, allowed);
  std::printf("\n");
  std::fflush(stdout);
}

void check_models(CudaDevice& device) {
  auto model = [](std::vector<LayerKind> mixers, MlpKind mlp, auto change) {
    const std::size_t layers = mixers.size();
    config::Model m = fixture::model(std::move(mixers), std::vector<MlpKind>(layers, mlp));
    m.hidden = 64;
    m.moe.experts = 8;
    change(m);
    return m;
  };
  const std::vector<LayerKind> hybrid{LayerKind::Gdn, LayerKind::Gdn2, LayerKind::Attention};
  auto nothing = [](config::Model&) {};
  auto wide = [](config::Model& m) {
    m.gdn.key_head_dim = m.gdn.value_head_dim = 128;
    m.gdn.conv_bias = true;
    m.attention.head_dim = 256;
    m.attention.kv_heads = 1;
  };
  auto plain = [](config::Model& m) {
    m.gdn.use_qk_l2norm = false;
    m.gdn.negative_eigenvalues = true;
    m.attention.whole_vector_qk_norm = true;
    m.attention.output_gate = false;
  };
  for (const ModelCase& c : {ModelCase{"hybrid, native", "native", model(hybrid, MlpKind::Dense, nothing)},
                             {"hybrid, megatron", "megatron", model(hybrid, MlpKind::Dense, nothing)},
                             {"hybrid, wide heads, conv bias, native", "native", model(hybrid, MlpKind::Dense, wide)},
                             {"hybrid, wide heads, conv bias, megatron", "megatron", model(hybrid, MlpKind::Dense, wide)},
                             {"hybrid, no L2 norm, no gate, native", "native", model({LayerKind::Gdn, LayerKind::Attention}, MlpKind::Dense, plain)},
                             {"experts, native", "native", model({LayerKind::Gdn, LayerKind::Attention}, MlpKind::Moe, nothing)},
                             {"experts, megatron", "megatron", model({LayerKind::Gdn, LayerKind::Attention}, MlpKind::Moe, nothing)}})
    try {
      check_model(c, device);
    } catch (const Error& e) {
      std::printf("%-40s FAILED: %s\n", c.name, e.what());
      ++failures;
      if (e.code() == ErrorCode::Cuda) throw;
    }
}

} // namespace

int main(int argc, char** argv) try {
  std::string why;
  if (!have_cuda_device(&why)) {
    std::printf("no CUDA device: %s\n", why.c_str());
    return kSkip;
  }
  const std::string what = argc > 1 ? argv[1] : "all";
  CudaDevice device;
  if (what == "all" || what == "attention") check_attention();
  if (what == "all" || what == "models") check_models(device);
  if (what == "bench") bench();
  std::printf(failures == 0 ? "all checks passed\n" : "%d checks FAILED\n", failures);
  return failures == 0 ? 0 : 1;
} catch (const std::exception& e) {
  std::printf("FAILED: %s\n", e.what());
  return 1;
}
