// The convolution of a decode step. A thread owns two channels of a token. The first token of a request
// also does the two after it and then writes the new state: nobody else reads the old one.
#include "kernels/common/check.h"
#include "kernels/common/row_vector.cuh"
#include "kernels/gdn/decode_batch.cuh"

namespace gdn::kernels {
namespace {

constexpr int kThreads = 256;

// The last four inputs of two neighbouring channels, as they lie in the pool.
struct Window {
  std::uint16_t x[2][kDecodeTaps];
  __device__ static Window load(const Bf16* p) {
    Window w;
    *reinterpret_cast<uint4*>(w.x) = *reinterpret_cast<const uint4*>(p);
    return w;
  }
  __device__ void store(Bf16* p) const {
    *reinterpret_cast<uint4*>(p) = *reinterpret_cast<const uint4*>(x);
  }
  __device__ void push(const Bf16* input) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int tap = 0; tap + 1 < kDecodeTaps; ++tap) x[c][tap] = x[c][tap + 1];
      x[c][kDecodeTaps - 1] = input[c].bits;
    }
  }
};
static_assert(sizeof(Window) == 16);

__global__ void __launch_bounds__(kThreads)
    gdn_decode_conv_kernel(const __grid_constant__ GdnDecodeConvParams p) {
  const std::int64_t pairs = p.channels / 2;
  const std::int64_t index = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const std::int64_t token = index / pairs, channel = 2 * (index % pairs);
  if (token >= p.batch.tokens) return;
  const std::int64_t request = request_of(p.batch, token);
  if (request < 0) return;
  const DecodeRequest at = decode_request(p.batch, request);
  const std::int64_t inside = token - at.first;
  const bool leads = inside == 0;
  if (at.slot < 0) {
    for (int c = 0; c < 2; ++c) p.y[token * p.y_stride + channel + c].bits = 0;
    return;
  }
  if (!leads && inside < kDecodeTaps - 1) return; // the first token's thread does it

  const Bf16* const x = p.x + channel;
  alignas(16) Window window;
  Bf16* const state = p.state + (at.slot * p.state_channels + channel) * kDecodeTaps;
  if (leads) {
    window = Window::load(state);
  } else {
    for (int back = kDecodeTaps - 1; back > 0; --back) window.push(x + (token - back) * p.x_stride);
  }
  const Window taps = Window::load(p.weight + channel * kDecodeTaps);
  const std::int64_t end = leads ? min(at.end, token + kDecodeTaps - 1) : token + 1;
  for (std::int64_t t = token; t < end; ++t) {
    window.push(x + t * p.x_stride);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float sum = p.bias == nullptr ? 0.0f : RowVector<4>::widen(p.bias[channel + c].bits);
#pragma unroll
      for (int tap = 0; tap < kDecodeTaps; ++tap)
        sum += RowVector<4>::widen(taps.x[c][tap]) * RowVector<4>::widen(window.x[c][tap]);
      p.y[t * p.y_stride + channel + c].bits = RowVector<4>::narrow(p.silu ? sum * sigmoid(sum) : sum);
    }
    if (p.token_state != nullptr)
      window.store(p.token_state + (t * p.state_channels + channel) * kDecodeTaps);
  }
  if (!leads) return;
  if (end < at.end)
    for (int back = kDecodeTaps; back > 0; --back) window.push(x + (at.end - back) * p.x_stride);
  window.store(state);
}

bool on_16_bytes(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; }

} // namespace

void gdn_decode_conv(const GdnDecodeConvParams& given, const LaunchContext& context) {
  GdnDecodeConvParams p = given;
  if (p.state_channels == 0) p.state_channels = p.channels;
  if (p.state_channels < p.channels || p.state_channels % 2 != 0 || p.channels < 2 || p.channels % 2 != 0 || p.batch.tokens < 0 || p.batch.requests < 0 ||
      (p.batch.cu_tokens == nullptr && p.batch.tokens != p.batch.requests) ||
      !on_16_bytes(p.state) || !on_16_bytes(p.weight) || !on_16_bytes(p.token_state))
    refuse("gdn_decode_conv",
           {{"channels", p.channels}, {"of a slot", p.state_channels}, {"tokens", p.batch.tokens}, {"requests", p.batch.requests}},
           "channels even, one token a request without offsets, state and weight on 16 bytes");
  const std::int64_t threads = p.batch.tokens * (p.channels / 2);
  if (threads == 0) return;
  const auto ctas = static_cast<unsigned>((threads + kThreads - 1) / kThreads);
  gdn_decode_conv_kernel<<<ctas, kThreads, 0, context.stream>>>(p);
  check_launch("gdn_decode_conv_kernel");
}

} // namespace gdn::kernels
