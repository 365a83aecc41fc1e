// Decode kernels (convolution, rule, moving of states) against fp64 loops on the CPU: widths, groups,
// several tokens a request, empty requests and places nobody sits in, states after every token; CUDA-graph
// replay equal to single launches, every other entry of the pools untouched, prefill through the chunk
// kernel and then decode.
//   gdn_decode_check [bench]
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numeric>

#include "core/error.h"
#include "kernels/gdn/chunk_table.h"
#include "kernels/gdn/decode.h"
#include "tests/gpu/device.h"

using namespace gdn;
using namespace gdn::gpu_test;
using Doubles = std::vector<double>;

namespace {

double sigmoid(double x) { return x >= 0 ? 1 / (1 + std::exp(-x)) : std::exp(x) / (1 + std::exp(x)); }
double softplus(double x) { return x > 20 ? x : std::log1p(std::exp(x)); }

template <class T>
std::vector<T> random_values(std::size_t count, std::uint64_t seed, double size = 1, double mean = 0) {
  Random random{seed};
  std::vector<T> out(count);
  for (auto& x : out) {
    const auto y = static_cast<float>(mean + size * random.normal());
    if constexpr (std::is_same_v<T, Bf16>)
      x = to_bf16(y);
    else
      x = static_cast<T>(y);
  }
  return out;
}

int failures = 0;

void expect(bool ok, const char* what) {
  failures += !ok;
  if (!ok) std::printf(" %s FAILED", what);
}

// Relative L2 error below `limit`; every value written (poison is NaN).
template <class T>
void compare(const char* name, const std::vector<T>& got, const Doubles& want, double limit) {
  double error = 0, size = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    error += std::pow(value(got[i]) - want[i], 2);
    size += want[i] * want[i];
  }
  const double relative = error > 0 || std::isnan(error) ? std::sqrt(error / std::max(size, 1e-60)) : 0;
  const bool ok = got.size() == want.size() && relative <= limit;
  failures += !ok;
  std::printf(" %s %.1e%s", name, relative, ok ? "" : " FAILED");
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// One rounding to bf16 has at most 2^-9 relative error, half of it in the mean; fp32 sums of 256 terms
// stay far below 1e-5.
constexpr double kBf16Limit = 3e-3, kFp32Limit = 1e-5;

struct Shape {
  int key_heads, value_heads, key_dim, value_dim;
  std::vector<int> lengths; // of the requests; empty list: one token each
  int requests;             // used when the list is empty
  bool l2_norm, double_beta, bias, per_token;
};

// A batch on the device: slots scattered over a pool of about twice as many entries, the third request
// without a place.
struct Batch {
  explicit Batch(const Shape& s, bool fillers = true) {
    const int requests = s.lengths.empty() ? s.requests : static_cast<int>(s.lengths.size());
    pool = 2 * requests + 1;
    for (int r = 0; r < requests; ++r) {
      offsets.push_back(offsets.back() + (s.lengths.empty() ? 1 : s.lengths[static_cast<std::size_t>(r)]));
      slots.push_back(fillers && r == 2 ? -1 : (r * 2 + 3) % pool);
    }
    device_offsets = DeviceArray<std::int32_t>(offsets);
    device_slots = DeviceArray<std::int32_t>(slots);
    view = {requests, offsets.back(), s.lengths.empty() ? nullptr : device_offsets.get(), device_slots.get()};
  }
  int requests() const { return static_cast<int>(slots.size()); }
  int pool = 0;
  std::vector<std::int32_t> offsets{0}, slots;
  DeviceArray<std::int32_t> device_offsets, device_slots;
  kernels::GdnDecodeBatch view;
};

// Launches once, or several times through a captured graph.
void replay(int times, const std::function<void(const kernels::LaunchContext&)>& launch) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  GDN_CUDA(cudaStreamCreate(&stream));
  GDN_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  launch({.stream = stream});
  GDN_CUDA(cudaStreamEndCapture(stream, &graph));
  GDN_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  for (int i = 0; i < times; ++i) GDN_CUDA(cudaGraphLaunch(executable, stream));
  GDN_CUDA(cudaStreamSynchronize(stream));
  GDN_CUDA(cudaGraphExecDestroy(executable));
  GDN_CUDA(cudaGraphDestroy(graph));
  GDN_CUDA(cudaStreamDestroy(stream));
}

constexpr int kSteps = 3; // launches of every case, each continuing from the one before

// ------------------------------------------------------------------------------------- convolution ----

void check_conv(const Shape& s) {
  const Batch batch(s);
  const std::size_t channels = 2 * std::size_t(s.key_heads) * s.key_dim + std::size_t(s.value_heads) * s.value_dim;
  const std::size_t n = batch.offsets.back(), width = channels + 6; // rows are slices of wider ones
  const auto x = random_values<Bf16>(n * width, 1), weight = random_values<Bf16>(channels * 4, 2, 0.5);
  const auto bias = random_values<Bf16>(channels, 3, 0.3);
  const auto state = random_values<Bf16>(batch.pool * channels * 4, 4);
  DeviceArray<Bf16> dx(x), dweight(weight), dbias(bias), dstate(state), y(n * channels), token_state(n * channels * 4);
  // Channels first .. first + count; whole: as if there were no others.
  auto part = [&](std::size_t first, std::size_t count, bool whole, const kernels::LaunchContext& context) {
    kernels::GdnDecodeConvParams p{batch.view, std::int64_t(count), dx.get() + first, std::int64_t(width), dweight.get() + 4 * first,
                                   s.bias ? dbias.get() + first : nullptr, dstate.get() + 4 * first, y.get() + first, std::int64_t(channels),
                                   s.per_token ? token_state.get() + 4 * first : nullptr};
    if (!whole) p.state_channels = std::int64_t(channels);
    kernels::gdn_decode_conv(p, context);
  };
  auto launch = [&](const kernels::LaunchContext& context) { part(0, channels, true, context); };
  Doubles want_state(state.size()), want_y(n * channels, 0), want_tokens;
  for (std::size_t i = 0; i < state.size(); ++i) want_state[i] = value(state[i]);
  std::vector<bool> used(batch.pool, false);
  for (int step = 0; step < kSteps; ++step) {
    want_tokens.assign(n * channels * 4, 0);
    for (int r = 0; r < batch.requests(); ++r) {
      if (batch.slots[r] < 0) continue;
      used[batch.slots[r]] = true;
      for (std::size_t c = 0; c < channels; ++c) {
        double* const w = &want_state[(batch.slots[r] * channels + c) * 4];
        for (int t = batch.offsets[r]; t < batch.offsets[r + 1]; ++t) {
          std::rotate(w, w + 1, w + 4);
          w[3] = value(x[t * width + c]);
          double sum = s.bias ? value(bias[c]) : 0;
          for (int tap = 0; tap < 4; ++tap) sum += value(weight[c * 4 + tap]) * w[tap];
          want_y[t * channels + c] = sum * sigmoid(sum);
          std::copy_n(w, 4, &want_tokens[(t * channels + c) * 4]);
        }
      }
    }
  }
  replay(kSteps, launch);
  const auto after = dstate.download();
  compare("conv y", y.download(), want_y, kBf16Limit);
  compare("state", after, want_state, 0); // inputs as they are: nothing is rounded, other entries included
  if (s.per_token) {
    auto got = token_state.download();
    for (int r = 0; r < batch.requests(); ++r) // rows of nobody are not written
      if (batch.slots[r] < 0) std::fill_n(got.begin() + batch.offsets[r] * channels * 4, (batch.offsets[r + 1] - batch.offsets[r]) * channels * 4, Bf16{0});
    compare("token states", got, want_tokens, 0);
  }
  dstate.upload(state);
  for (int step = 0; step < kSteps; ++step) launch({});
  GDN_CUDA(cudaDeviceSynchronize());
  expect(same_bits(after, dstate.download()), "replay equal to launches");
  const auto y_whole = y.download(), tokens_whole = token_state.download();
  dstate.upload(state);
  const std::size_t values = std::size_t(s.value_heads) * s.value_dim;
  for (int step = 0; step < kSteps; ++step) {
    part(0, channels - values, false, {});
    part(channels - values, values, false, {});
  }
  GDN_CUDA(cudaDeviceSynchronize());
  expect(same_bits(after, dstate.download()) && same_bits(y_whole, y.download()) && same_bits(tokens_whole, token_state.download()), "sections equal to the whole");
  expect(y.guard_intact() && dstate.guard_intact() && token_state.guard_intact(), "guards");
}

// -------------------------------------------------------------------------------------------- rule ----

struct RuleData { // host inputs of one case
  explicit RuleData(const Shape& s, std::size_t n)
      : channels(2 * std::size_t(s.key_heads) * s.key_dim + std::size_t(s.value_heads) * s.value_dim), width(channels + 2 * s.value_heads + 4),
        rows(random_values<Bf16>(n * width, 11)), a_log(random_values<float>(s.value_heads, 12, 0.7, -1)),
        dt_bias(random_values<float>(s.value_heads, 13, 0.5, 1)) {}
  std::size_t channels, width; // a row: q | k | v | beta | alpha | 4 unused
  std::vector<Bf16> rows;
  std::vector<float> a_log, dt_bias;
};

// One token of one value head: S [key_dim, value_dim] is updated, o [value_dim] written.
void recurrent_step(const Shape& s, const RuleData& d, std::size_t token, int head, double scale, double* S, double* o) {
  const Bf16* const row = &d.rows[token * d.width];
  const int K = s.key_dim, V = s.value_dim, key_head = head / (s.value_heads / s.key_heads);
  Doubles q(K), k(K);
  double qq = 1e-6, kk = 1e-6;
  for (int i = 0; i < K; ++i) {
    q[i] = value(row[key_head * K + i]);
    k[i] = value(row[(s.key_heads + key_head) * K + i]);
    qq += q[i] * q[i];
    kk += k[i] * k[i];
  }
  if (s.l2_norm)
    for (int i = 0; i < K; ++i) q[i] /= std::sqrt(qq), k[i] /= std::sqrt(kk);
  const double decay = std::exp(-std::exp(double(d.a_log[head])) * softplus(value(row[d.channels + s.value_heads + head]) + d.dt_bias[head]));
  const double beta = (s.double_beta ? 2 : 1) * sigmoid(value(row[d.channels + head]));
  for (int j = 0; j < V; ++j) {
    double along = 0;
    for (int i = 0; i < K; ++i) along += (S[i * V + j] *= decay) * k[i];
    const double u = beta * (value(row[2 * s.key_heads * K + head * V + j]) - along);
    o[j] = 0;
    for (int i = 0; i < K; ++i) o[j] += scale * (S[i * V + j] += k[i] * u) * q[i];
  }
}

kernels::GdnDecodeRuleParams rule_params(const Shape& s, const RuleData& d, const kernels::GdnDecodeBatch& batch, const Bf16* rows,
                                         const float* a_log, const float* dt_bias, float scale, float* state, Bf16* o, float* token_state) {
  const auto stride = std::int64_t(d.width);
  const Bf16* const k = rows + s.key_heads * s.key_dim;
  const Bf16* const v = k + s.key_heads * s.key_dim;
  return {.batch = batch, .key_heads = s.key_heads, .value_heads = s.value_heads, .key_dim = s.key_dim, .value_dim = s.value_dim,
          .q = {rows, stride, s.key_dim}, .k = {k, stride, s.key_dim}, .v = {v, stride, s.value_dim},
          .beta_logits = rows + d.channels, .beta_stride = stride, .alpha = rows + d.channels + s.value_heads, .alpha_stride = stride,
          .a_log = a_log, .dt_bias = dt_bias, .double_beta = s.double_beta, .scale = scale, .l2_norm = s.l2_norm,
          .state = state, .o = o, .token_state = token_state};
}

void check_rule(const Shape& s) {
  const Batch batch(s);
  const std::size_t n = batch.offsets.back(), K = s.key_dim, V = s.value_dim, hv = s.value_heads, size = hv * K * V;
  const double scale = 1 / std::sqrt(double(K));
  RuleData d(s, n);
  if (!s.l2_norm) // keys near the unit sphere, as the domain beta |k|^2 <= 2 asks
    for (std::size_t t = 0; t < n; ++t)
      for (std::size_t i = 0; i < 2 * s.key_heads * K; ++i) d.rows[t * d.width + i] = to_bf16(float(value(d.rows[t * d.width + i]) * scale));
  const auto state = random_values<float>(batch.pool * size, 14, 0.3);
  DeviceArray<Bf16> rows(d.rows), o(n * hv * V);
  DeviceArray<float> a_log(d.a_log), dt_bias(d.dt_bias), dstate(state), token_state(s.per_token ? n * size : 4);
  auto launch = [&](const kernels::LaunchContext& context) {
    kernels::gdn_decode_rule(rule_params(s, d, batch.view, rows.get(), a_log.get(), dt_bias.get(), float(scale), dstate.get(), o.get(),
                                         s.per_token ? token_state.get() : nullptr),
                             context);
  };
  Doubles want_o(n * hv * V, 0), want_state, want_tokens(s.per_token ? n * size : 0, 0);
  std::vector<float> got_state, got_tokens = token_state.download();
  std::vector<bool> used(batch.pool, false);
  Doubles S(state.begin(), state.end());
  for (int step = 0; step < kSteps; ++step)
    for (int r = 0; r < batch.requests(); ++r) {
      if (batch.slots[r] < 0) continue;
      used[batch.slots[r]] = true;
      for (int t = batch.offsets[r]; t < batch.offsets[r + 1]; ++t)
        for (std::size_t h = 0; h < hv; ++h) {
          double* const at = &S[batch.slots[r] * size + h * K * V];
          recurrent_step(s, d, t, int(h), scale, at, &want_o[(t * hv + h) * V]);
          if (s.per_token) std::copy_n(at, K * V, &want_tokens[(t * hv + h) * K * V]);
        }
    }
  replay(kSteps, launch);
  const auto after = dstate.download();
  bool untouched = true;
  for (int p = 0; p < batch.pool; ++p) {
    if (used[p]) {
      want_state.insert(want_state.end(), S.begin() + p * size, S.begin() + (p + 1) * size);
      got_state.insert(got_state.end(), after.begin() + p * size, after.begin() + (p + 1) * size);
    } else {
      untouched &= std::memcmp(&after[p * size], &state[p * size], size * sizeof(float)) == 0;
    }
  }
  expect(untouched, "other entries of the pool");
  compare("rule o", o.download(), want_o, kBf16Limit);
  compare("state", got_state, want_state, kFp32Limit);
  if (s.per_token) {
    got_tokens = token_state.download();
    for (int r = 0; r < batch.requests(); ++r)
      if (batch.slots[r] < 0) std::fill_n(got_tokens.begin() + batch.offsets[r] * size, (batch.offsets[r + 1] - batch.offsets[r]) * size, 0.0f);
    compare("token states", got_tokens, want_tokens, kFp32Limit);
  }
  dstate.upload(state);
  for (int step = 0; step < kSteps; ++step) launch({});
  GDN_CUDA(cudaDeviceSynchronize());
  expect(same_bits(after, dstate.download()), "replay equal to launches");

  std::vector<float> g(n * hv), beta(n * hv); // made before, as the ops of a layer do
  for (std::size_t i = 0; i < g.size(); ++i) {
    const Bf16* const gates = &d.rows[i / hv * d.width + d.channels];
    g[i] = float(-std::exp(double(d.a_log[i % hv])) * softplus(value(gates[hv + i % hv]) + d.dt_bias[i % hv]));
    beta[i] = float((s.double_beta ? 2 : 1) * sigmoid(value(gates[i % hv])));
  }
  DeviceArray<float> dg(g), dbeta(beta);
  auto p = rule_params(s, d, batch.view, rows.get(), nullptr, nullptr, float(scale), dstate.get(), o.get(), s.per_token ? token_state.get() : nullptr);
  p.alpha = p.beta_logits = nullptr;
  p.g = dg.get();
  p.beta = dbeta.get();
  dstate.upload(state);
  for (int step = 0; step < kSteps; ++step) kernels::gdn_decode_rule(p, {});
  GDN_CUDA(cudaDeviceSynchronize());
  const auto after_made = dstate.download();
  got_state.clear();
  for (int i = 0; i < batch.pool; ++i)
    if (used[i]) got_state.insert(got_state.end(), after_made.begin() + i * size, after_made.begin() + (i + 1) * size);
  compare("gates made: o", o.download(), want_o, kBf16Limit);
  compare("state", got_state, want_state, kFp32Limit);
  expect(o.guard_intact() && dstate.guard_intact() && token_state.guard_intact(), "guards");
}

// A graph captured once serves other requests: the index array changes, the graph does not.
void check_other_requests() {
  const Shape s{2, 4, 128, 128, {}, 4, true, false, false, false};
  const std::size_t size = std::size_t(4) * 128 * 128;
  Batch batch(s, false);
  const RuleData d(s, 4);
  const auto state = random_values<float>(batch.pool * size, 21, 0.3);
  DeviceArray<Bf16> rows(d.rows), o(4 * 4 * 128);
  DeviceArray<float> a_log(d.a_log), dt_bias(d.dt_bias), dstate(state);
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  GDN_CUDA(cudaStreamCreate(&stream));
  GDN_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  kernels::gdn_decode_rule(rule_params(s, d, batch.view, rows.get(), a_log.get(), dt_bias.get(), 0.1f, dstate.get(), o.get(), nullptr), {.stream = stream});
  GDN_CUDA(cudaStreamEndCapture(stream, &graph));
  GDN_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  std::vector<int> steps(batch.pool, 0);
  for (const std::vector<std::int32_t>& slots : {batch.slots, {8, 0, -1, 1}, {2, 3, 4, 0}}) {
    batch.device_slots.upload(slots);
    GDN_CUDA(cudaGraphLaunch(executable, stream));
    GDN_CUDA(cudaStreamSynchronize(stream));
  }
  Doubles S(state.begin(), state.end()), o_unused(128);
  for (const std::vector<std::int32_t>& slots : {batch.slots, {8, 0, -1, 1}, {2, 3, 4, 0}})
    for (int r = 0; r < 4; ++r)
      for (int h = 0; slots[r] >= 0 && h < 4; ++h) recurrent_step(s, d, r, h, 0.1f, &S[slots[r] * size + h * 128 * 128], o_unused.data());
  std::printf("one graph, three sets of requests:");
  compare("state", dstate.download(), S, kFp32Limit);
  std::printf("\n");
  GDN_CUDA(cudaGraphExecDestroy(executable));
  GDN_CUDA(cudaGraphDestroy(graph));
  GDN_CUDA(cudaStreamDestroy(stream));
}

// ----------------------------------------------------------------------------- prefill, then decode ----

// Two requests of 150 and 70 tokens through the chunk kernel, whose final states go into the pool, one
// more token each through the decode kernel: the state is that of the token recurrence over all of them.
void check_prefill() {
  const Shape s{2, 4, 128, 128, {}, 2, true, false, false, false};
  const std::vector<int> lengths{150, 70};
  const int n = 220, hk = 2, hv = 4, D = 128;
  const std::size_t size = std::size_t(hv) * D * D;
  const float scale = 0.0883883f;
  RuleData d(s, n + 2); // the last two rows: the tokens to decode
  std::vector<float> g(std::size_t(n) * hv), beta(g.size());
  for (int t = 0; t < n; ++t)
    for (int h = 0; h < hv; ++h) {
      const Bf16* const row = &d.rows[t * d.width];
      g[t * hv + h] = float(-std::exp(double(d.a_log[h])) * softplus(value(row[d.channels + hv + h]) + d.dt_bias[h]));
      beta[t * hv + h] = float(sigmoid(value(row[d.channels + h])));
    }
  Batch batch(s, false);
  const auto state = random_values<float>(batch.pool * size, 22, 0.3);
  DeviceArray<Bf16> rows(d.rows), o(std::size_t(n) * hv * D), o_token(2 * hv * D);
  DeviceArray<float> a_log(d.a_log), dt_bias(d.dt_bias), pool(state), dense(2 * size), dg(g), dbeta(beta);
  DeviceArray<std::int32_t> bounds(std::vector<std::int32_t>{0, 150, 220});
  const kernels::GdnShape shape{n, 2, hk, hv, D, D};
  DeviceArray<char> scratch(kernels::gdn_chunk_forward_scratch(shape)), table_memory(kernels::gdn_chunk_table_bytes(n, 2));
  const kernels::LaunchContext context{.scratch = scratch.get(), .scratch_bytes = std::int64_t(scratch.size())};
  const auto table = kernels::gdn_chunk_table_at(table_memory.get(), n, 2);
  kernels::gdn_chunk_table({bounds.get(), false, n, 2, table}, context);
  kernels::gdn_move_states({pool.get(), dense.get(), batch.device_slots.get(), 2, std::int64_t(size), false}, context);
  DeviceArray<Bf16> packed(std::size_t(n) * d.channels); // the chunk kernel wants 16-byte rows
  GDN_CUDA(cudaMemcpy2D(packed.get(), d.channels * 2, rows.get(), d.width * 2, d.channels * 2, n, cudaMemcpyDeviceToDevice));
  DeviceArray<Bf16> n_saved(std::size_t(n) * hv * 64);
  kernels::GdnChunkForwardParams p;
  p.shape = shape;
  p.table = table;
  const auto stride = std::int64_t(d.channels);
  p.q = {packed.get(), stride, D};
  p.k = {packed.get() + hk * D, stride, D};
  p.v = {packed.get() + 2 * hk * D, stride, D};
  p.g = dg.get();
  p.beta = dbeta.get();
  p.scale = scale;
  p.l2_norm = true;
  p.initial_state = dense.get();
  p.final_state = dense.get();
  p.o = o.get();
  p.n = n_saved.get();
  kernels::gdn_chunk_forward(p, context);
  kernels::gdn_move_states({pool.get(), dense.get(), batch.device_slots.get(), 2, std::int64_t(size), true}, context);
  const auto moved = pool.download();
  const auto o_moved = o.download();
  DeviceArray<float> direct(state); // the same without moving
  p.initial_state = p.final_state = direct.get();
  p.state_slots = batch.device_slots.get();
  kernels::gdn_chunk_forward(p, context);
  GDN_CUDA(cudaDeviceSynchronize());
  expect(same_bits(moved, direct.download()) && same_bits(o_moved, o.download()), "states in the pool equal to moved ones");
  auto decode = rule_params(s, d, batch.view, rows.get() + n * d.width, a_log.get(), dt_bias.get(), scale, pool.get(), o_token.get(), nullptr);
  kernels::gdn_decode_rule(decode, context);
  Doubles S(state.begin(), state.end()), want_o(2 * hv * D);
  for (int r = 0, first = 0; r < 2; first += lengths[r], ++r)
    for (int h = 0; h < hv; ++h) {
      double* const at = &S[batch.slots[r] * size + h * D * D];
      for (int t = 0; t < lengths[r]; ++t) recurrent_step(s, d, first + t, h, scale, at, &want_o[(r * hv + h) * D]);
      recurrent_step(s, d, n + r, h, scale, at, &want_o[(r * hv + h) * D]);
    }
  std::printf("prefill, then decode:");
  compare("o", o_token.download(), want_o, 6.7e-3); // of the chunk kernel's bf16 products, as gdn_rule_check allows
  compare("states", pool.download(), S, 6.7e-3);
  std::printf("\n");
}

// ------------------------------------------------------------------------------------------- bench ----

// Median under graph replay beside the floor: states read and written once, at the rate of a device copy.
void bench() {
  constexpr double kBandwidth = 4.2e12;
  std::printf("16/32 heads, d = 128, one token a request; us, floor = bytes / 4.2 TB/s\n%9s %9s %9s %7s %9s %9s %7s\n", "requests", "rule", "floor",
              "ratio", "conv", "floor", "ratio");
  for (const int requests : {1, 8, 32, 64, 128, 256, 512}) {
    const Shape s{16, 32, 128, 128, {}, requests, true, false, false, false};
    Batch batch(s, false);
    const RuleData d(s, requests);
    const std::size_t size = std::size_t(32) * 128 * 128, channels = d.channels;
    const auto seed = random_values<float>(size, 31, 0.3);
    DeviceArray<float> a_log(d.a_log), dt_bias(d.dt_bias), state(batch.pool * size);
    for (int i = 0; i < batch.pool; ++i) GDN_CUDA(cudaMemcpy(state.get() + i * size, seed.data(), size * 4, cudaMemcpyHostToDevice));
    DeviceArray<Bf16> rows(d.rows), o(std::size_t(requests) * 32 * 128), y(requests * channels);
    DeviceArray<Bf16> weight(random_values<Bf16>(channels * 4, 32, 0.5)), conv(random_values<Bf16>(batch.pool * channels * 4, 33));
    const auto rule = rule_params(s, d, batch.view, rows.get(), a_log.get(), dt_bias.get(), 0.0883883f, state.get(), o.get(), nullptr);
    const Timing a = time_graph([&](cudaStream_t stream) { kernels::gdn_decode_rule(rule, {.stream = stream}); }, 50);
    const Timing b = time_graph(
        [&](cudaStream_t stream) {
          kernels::gdn_decode_conv({batch.view, std::int64_t(channels), rows.get(), std::int64_t(d.width), weight.get(), nullptr, conv.get(), y.get(),
                                    std::int64_t(channels), nullptr},
                                   {.stream = stream});
        },
        50);
    const double rule_floor = 1e6 * requests * (2.0 * size * 4 + 2.0 * channels + 2.0 * 32 * 128) / kBandwidth;
    const double conv_floor = 1e6 * requests * channels * (2.0 * 8 + 4) / kBandwidth;
    std::printf("%9d %9.2f %9.2f %7.2f %9.2f %9.2f %7.2f\n", requests, 1e3 * a.median, rule_floor, 1e3 * a.median / rule_floor, 1e3 * b.median,
                conv_floor, 1e3 * b.median / conv_floor);
    std::fflush(stdout);
  }
}

} // namespace

int main(int argc, char** argv) try {
  if (!have_device()) return kSkip;
  if (argc > 1 && std::strcmp(argv[1], "bench") == 0) {
    bench();
    return 0;
  }
  const std::vector<Shape> shapes = {
      {2, 4, 128, 128, {}, 5, true, false, false, false},
      {1, 4, 128, 128, {1, 3, 2, 0, 5, 1, 9}, 0, true, true, true, true},
      {2, 2, 64, 64, {}, 7, true, false, true, true},
      {2, 4, 96, 192, {2, 1, 4, 7}, 0, true, false, false, true},
      {1, 2, 192, 192, {}, 4, true, true, false, false},
      {1, 2, 256, 256, {4, 1, 1, 2}, 0, true, false, true, true},
      {2, 4, 256, 512, {}, 3, false, false, false, false},
      {2, 4, 40, 24, {1, 2, 3, 4, 5}, 0, false, false, true, true},
      {16, 32, 128, 128, {}, 33, true, false, false, false},
  };
  for (const Shape& s : shapes) {
    std::printf("%d/%d heads, %d x %d, %zu requests:", s.key_heads, s.value_heads, s.key_dim, s.value_dim,
                s.lengths.empty() ? std::size_t(s.requests) : s.lengths.size());
    check_conv(s);
    check_rule(s);
    std::printf("\n");
    std::fflush(stdout);
  }
  check_other_requests();
  check_prefill();
  std::printf("%s\n", failures == 0 ? "all right" : "FAILURES");
  return failures == 0 ? 0 : 1;
} catch (const Error& error) {
  std::printf("error: %s\n", error.what());
  return 1;
}
