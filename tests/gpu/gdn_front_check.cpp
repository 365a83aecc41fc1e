// The front end (conv + SiLU + L2 norm + gates) and the gated norm, both directions, against fp64
// loops on the CPU: ragged sequences, slices of a wider projection, parameter sums, bitwise
// repeatability.
//   gdn_front_check [bench]
#include <cstdio>
#include <cstring>

#include "core/error.h"
#include "kernels/gdn/chunk_table.h"
#include "kernels/gdn/gated_norm.h"
#include "kernels/gdn/gdn_pre.h"
#include "tests/gpu/device.h"

using namespace gdn;
using namespace gdn::gpu_test;
using Doubles = std::vector<double>;

namespace {

double sigmoid(double x) {
  return x >= 0 ? 1 / (1 + std::exp(-x)) : std::exp(x) / (1 + std::exp(x));
}
double softplus(double x) { return x > 20 ? x : std::log1p(std::exp(x)); }

template <class T>
std::vector<T> random_values(std::size_t count, std::uint64_t seed, double size = 1,
                             double mean = 0) {
  Random random{seed};
  std::vector<T> out(count);
  for (auto& x : out) {
    const auto y = static_cast<float>(mean + size * random.normal());
    if constexpr (std::is_same_v<T, Bf16>)
      x = to_bf16(y);
    else
      x = y;
  }
  return out;
}

int failures = 0;

// Relative L2 error below `limit`; every value written (poison is NaN).
template <class T>
void compare(const char* name, const std::vector<T>& got, const Doubles& want, double limit) {
  double error = 0, size = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    error += std::pow(value(got[i]) - want[i], 2);
    size += want[i] * want[i];
  }
  const double relative =
      error > 0 || std::isnan(error) ? std::sqrt(error / std::max(size, 1e-60)) : 0;
  const bool ok = relative <= limit;
  failures += !ok;
  std::printf(" %s %.2e%s", name, relative, ok ? "" : " FAILED");
}

struct Shape {
  const char* name;
  std::vector<int> lengths;
  int padding, key_heads, value_heads, key_dim, value_dim;
  bool normalise, bias, double_beta;
};

struct FrontData { // host inputs of one case, and device buffers
  explicit FrontData(const Shape& s) : shape(s) {
    n = s.padding;
    for (int l : s.lengths) n += l;
    channels = 2 * s.key_heads * s.key_dim + s.value_heads * s.value_dim;
    width = channels + 2 * s.value_heads; // one projection row: qkv | beta | alpha
    proj = random_values<Bf16>(std::size_t(n) * width, 1);
    weight = random_values<Bf16>(std::size_t(channels) * 4, 2, 0.5);
    bias = random_values<Bf16>(channels, 3, 0.3);
    a_log = random_values<float>(s.value_heads, 4, 0.7, 1);
    dt_bias = random_values<float>(s.value_heads, 5, 0.5, 1);
    dq = random_values<Bf16>(std::size_t(n) * s.key_heads * s.key_dim, 6);
    dk = random_values<Bf16>(dq.size(), 7);
    dv = random_values<Bf16>(std::size_t(n) * s.value_heads * s.value_dim, 8);
    dg = random_values<float>(std::size_t(n) * s.value_heads, 9);
    dbeta = random_values<float>(dg.size(), 10);
    for (std::size_t i = std::size_t(n - s.padding) * width; i < proj.size(); ++i)
      proj[i] = {0x7fff};
  }
  Shape shape;
  int n, channels, width;
  std::vector<Bf16> proj, weight, bias, dq, dk, dv;
  std::vector<float> a_log, dt_bias, dg, dbeta;
};

struct FrontResult {
  Doubles q, k, v, g, beta, d_proj, d_weight, d_bias, d_a_log, d_dt_bias;
};

FrontResult reference(const FrontData& d) {
  const Shape& s = d.shape;
  FrontResult r;
  const int C = d.channels, hv = s.value_heads;
  r.q.assign(d.dq.size(), 0);
  r.k = r.q;
  r.v.assign(d.dv.size(), 0);
  r.g.assign(d.dg.size(), 0);
  r.beta = r.g;
  r.d_proj.assign(d.proj.size(), 0);
  r.d_weight.assign(std::size_t(C) * 4, 0);
  r.d_bias.assign(C, 0);
  r.d_a_log.assign(hv, 0);
  r.d_dt_bias = r.d_a_log;
  int first = 0;
  for (int len : s.lengths) {
    for (int t = 0; t < len; ++t) {
      const std::size_t row = std::size_t(first + t);
      auto x = [&](int u, int c) {
        return u < 0 ? 0.0 : value(d.proj[(first + u) * std::size_t(d.width) + c]);
      };
      const int heads = 2 * s.key_heads + hv;
      for (int h = 0; h < heads; ++h) {
        const bool key = h < 2 * s.key_heads;
        const int width = key ? s.key_dim : s.value_dim;
        const int c0 =
            key ? h * s.key_dim : 2 * s.key_heads * s.key_dim + (h - 2 * s.key_heads) * s.value_dim;
        const int own = h < s.key_heads ? h : key ? h - s.key_heads : h - 2 * s.key_heads;
        const int count = key ? s.key_heads : hv;
        Doubles& y_out = h < s.key_heads ? r.q : key ? r.k : r.v;
        const auto& dy_in = h < s.key_heads ? d.dq : key ? d.dk : d.dv;
        const std::size_t at = (row * count + own) * width;
        Doubles p(width), y(width), dy(width);
        double sum = 1e-6f, along = 0;
        for (int i = 0; i < width; ++i) {
          p[i] = s.bias ? value(d.bias[c0 + i]) : 0;
          for (int w = 0; w < 4; ++w)
            p[i] += value(d.weight[(c0 + i) * 4 + w]) * x(t - 3 + w, c0 + i);
          y[i] = p[i] * sigmoid(p[i]);
          dy[i] = value(dy_in[at + i]);
          sum += y[i] * y[i];
          along += y[i] * dy[i];
        }
        const double rho = key && s.normalise ? 1 / std::sqrt(sum) : 1;
        for (int i = 0; i < width; ++i) {
          y_out[at + i] = y[i] * rho;
          double dp = key && s.normalise ? rho * (dy[i] - along * rho * rho * y[i]) : dy[i];
          const double sg = sigmoid(p[i]);
          dp *= sg * (1 + p[i] * (1 - sg));
          r.d_bias[c0 + i] += dp;
          for (int w = 0; w < 4; ++w) {
            r.d_weight[(c0 + i) * 4 + w] += dp * x(t - 3 + w, c0 + i);
            if (t - 3 + w >= 0)
              r.d_proj[(row - 3 + w) * d.width + c0 + i] += dp * value(d.weight[(c0 + i) * 4 + w]);
          }
        }
      }
      for (int h = 0; h < hv; ++h) {
        const double b = value(d.proj[row * d.width + C + h]),
                     a = value(d.proj[row * d.width + C + hv + h]);
        const double rate = std::exp(double(d.a_log[h])), z = a + d.dt_bias[h],
                     two = s.double_beta ? 2 : 1;
        const std::size_t at = row * hv + h;
        r.g[at] = -rate * softplus(z);
        r.beta[at] = two * sigmoid(b);
        const double da = -rate * sigmoid(z) * d.dg[at];
        r.d_proj[row * d.width + C + hv + h] = da;
        r.d_proj[row * d.width + C + h] = two * d.dbeta[at] * sigmoid(b) * sigmoid(-b);
        r.d_a_log[h] += d.dg[at] * r.g[at];
        r.d_dt_bias[h] += da;
      }
    }
    first += len;
  }
  return r;
}

// Device buffers and the two launches of one case.
class FrontRunner {
public:
  explicit FrontRunner(const FrontData& d)
      : proj_(d.proj), weight_(d.weight), bias_(d.bias), dq_(d.dq), dk_(d.dk), dv_(d.dv),
        a_log_(d.a_log), dt_bias_(d.dt_bias), dg_(d.dg), dbeta_(d.dbeta), q(d.dq.size()),
        k(d.dk.size()), v(d.dv.size()), d_proj(d.proj.size()), g(d.dg.size()), beta(d.dg.size()),
        d_weight(std::size_t(d.channels) * 4), d_bias(d.channels), d_a_log(d.shape.value_heads),
        d_dt_bias(d.shape.value_heads) {
    const Shape& s = d.shape;
    std::vector<std::int32_t> bounds{0};
    for (int l : s.lengths) bounds.push_back(bounds.back() + l);
    bounds_ = DeviceArray<std::int32_t>(bounds);
    const kernels::GdnShape shape{d.n,         static_cast<std::int64_t>(s.lengths.size()),
                                  s.key_heads, s.value_heads,
                                  s.key_dim,   s.value_dim};
    table_memory_ =
        DeviceArray<char>(kernels::gdn_chunk_table_bytes(shape.tokens, shape.sequences));
    const auto table =
        kernels::gdn_chunk_table_at(table_memory_.get(), shape.tokens, shape.sequences);
    scratch_ = DeviceArray<char>(kernels::gdn_pre_backward_scratch(shape));
    context_.scratch = scratch_.get();
    context_.scratch_bytes = static_cast<std::int64_t>(scratch_.size());
    kernels::gdn_chunk_table({bounds_.get(), false, shape.tokens, shape.sequences, table},
                             context_);
    kernels::GdnPreInputs in;
    in.shape = shape;
    in.table = table;
    in.qkv = proj_.get();
    in.beta_logits = proj_.get() + d.channels;
    in.alpha = in.beta_logits + s.value_heads;
    in.qkv_stride = in.beta_stride = in.alpha_stride = d.width;
    in.conv_weight = weight_.get();
    in.conv_bias = s.bias ? bias_.get() : nullptr;
    in.a_log = a_log_.get();
    in.dt_bias = dt_bias_.get();
    in.normalise = s.normalise;
    in.double_beta = s.double_beta;
    f_.in = b_.in = in;
    f_.q = q.get();
    f_.k = k.get();
    f_.v = v.get();
    f_.g = g.get();
    f_.beta = beta.get();
    b_.dq = dq_.get();
    b_.dk = dk_.get();
    b_.dv = dv_.get();
    b_.dg = dg_.get();
    b_.dbeta = dbeta_.get();
    b_.d_qkv = d_proj.get();
    b_.d_beta_logits = d_proj.get() + d.channels;
    b_.d_alpha = b_.d_beta_logits + s.value_heads;
    b_.d_qkv_stride = b_.d_beta_stride = b_.d_alpha_stride = d.width;
    b_.d_conv_weight = d_weight.get();
    b_.d_conv_bias = s.bias ? d_bias.get() : nullptr;
    b_.d_a_log = d_a_log.get();
    b_.d_dt_bias = d_dt_bias.get();
  }
  void zero_sums() { // parameter gradients are added to: start from 1
    for (auto* x : {&d_weight, &d_bias, &d_a_log, &d_dt_bias})
      x->upload(std::vector<float>(x->size(), 1.0f));
  }
  void forward(cudaStream_t stream) {
    context_.stream = stream;
    kernels::gdn_pre_forward(f_, context_);
  }
  void backward(cudaStream_t stream) {
    context_.stream = stream;
    kernels::gdn_pre_backward(b_, context_);
  }

private:
  DeviceArray<Bf16> proj_, weight_, bias_, dq_, dk_, dv_;
  DeviceArray<float> a_log_, dt_bias_, dg_, dbeta_;
  DeviceArray<std::int32_t> bounds_;
  DeviceArray<char> table_memory_, scratch_;
  kernels::GdnPreForwardParams f_;
  kernels::GdnPreBackwardParams b_;
  kernels::LaunchContext context_;

public:
  DeviceArray<Bf16> q, k, v, d_proj;
  DeviceArray<float> g, beta, d_weight, d_bias, d_a_log, d_dt_bias;
};

Doubles minus_one(const std::vector<float>& x) {
  Doubles out(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) out[i] = double(x[i]) - 1;
  return out;
}

void check_front(const Shape& s) {
  const FrontData data(s);
  const FrontResult want = reference(data);
  FrontRunner run(data);
  std::vector<std::vector<float>> sums;
  for (int repeat = 0; repeat < 2; ++repeat) {
    run.zero_sums();
    run.forward(nullptr);
    run.backward(nullptr);
    GDN_CUDA(cudaDeviceSynchronize());
    sums.push_back(run.d_weight.download());
  }
  std::printf("front %-24s", s.name);
  compare("q", run.q.download(), want.q, 3e-3);
  compare("k", run.k.download(), want.k, 3e-3);
  compare("v", run.v.download(), want.v, 3e-3);
  compare("g", run.g.download(), want.g, 1e-6);
  compare("beta", run.beta.download(), want.beta, 1e-6);
  compare("dx", run.d_proj.download(), want.d_proj, 3e-3);
  compare("dw", minus_one(run.d_weight.download()), want.d_weight, 1e-5);
  if (s.bias) compare("dbias", minus_one(run.d_bias.download()), want.d_bias, 1e-5);
  compare("dA", minus_one(run.d_a_log.download()), want.d_a_log, 1e-5);
  compare("ddt", minus_one(run.d_dt_bias.download()), want.d_dt_bias, 1e-5);
  if (std::memcmp(sums[0].data(), sums[1].data(), sums[0].size() * 4) != 0) {
    ++failures;
    std::printf(" NOT REPEATABLE");
  }
  std::printf("\n");
}

// Gated norm: o [tokens, heads, width], z a slice of rows `pad` elements wider, the weight as far from its alignment.
struct NormRunner {
  NormRunner(int tokens, int heads, int width, int pad, double size)
      : n(tokens), heads(heads), width(width), stride(heads * width + pad),
        o(random_values<Bf16>(std::size_t(n) * heads * width, 1, size)),
        z(random_values<Bf16>(std::size_t(n) * stride, 2)),
        w(random_values<Bf16>(width, 3, 0.3, 1)), dy(random_values<Bf16>(o.size(), 4)), d_o(o),
        d_z(z), d_w(behind(pad, w)), d_dy(dy), y(o.size()), grad_o(o.size()), grad_z(z.size()),
        rstd(std::size_t(n) * heads), grad_w(width),
        scratch(kernels::gated_norm_backward_scratch(n, heads, width)) {
    context.scratch = scratch.get();
    context.scratch_bytes = static_cast<std::int64_t>(scratch.size());
    f.in = {n, heads, width, d_o.get(), d_z.get() + pad, stride, d_w.get() + pad, 1e-6f};
    f.y = y.get();
    f.rstd = rstd.get();
    b.in = f.in;
    b.rstd = rstd.get();
    b.dy = d_dy.get();
    b.d_o = grad_o.get();
    b.dz = grad_z.get() + pad;
    b.dz_stride = stride;
    b.d_weight = grad_w.get();
  }
  void forward(cudaStream_t stream) {
    context.stream = stream;
    kernels::gated_norm_forward(f, context);
  }
  void backward(cudaStream_t stream) {
    context.stream = stream;
    kernels::gated_norm_backward(b, context);
  }
  static std::vector<Bf16> behind(int pad, std::vector<Bf16> x) {
    x.insert(x.begin(), static_cast<std::size_t>(pad), Bf16{});
    return x;
  }
  int n, heads, width, stride;
  std::vector<Bf16> o, z, w, dy;
  DeviceArray<Bf16> d_o, d_z, d_w, d_dy, y, grad_o, grad_z;
  DeviceArray<float> rstd, grad_w;
  DeviceArray<char> scratch;
  kernels::GatedNormForwardParams f;
  kernels::GatedNormBackwardParams b;
  kernels::LaunchContext context;
};

void check_norm(int tokens, int heads, int width, int pad, double size) {
  NormRunner run(tokens, heads, width, pad, size);
  run.grad_w.upload(std::vector<float>(width, 1.0f));
  run.forward(nullptr);
  run.backward(nullptr);
  GDN_CUDA(cudaDeviceSynchronize());
  Doubles y(run.o.size()), d_o(y), d_z(y), got_z(y), d_w(width, 0),
      rstd(std::size_t(tokens) * heads);
  const auto grad_z = run.grad_z.download();
  for (int t = 0; t < tokens; ++t)
    for (int h = 0; h < heads; ++h) {
      const std::size_t at = (std::size_t(t) * heads + h) * width;
      const std::size_t z_at = std::size_t(t) * run.stride + pad + h * width;
      double sum = 0, along = 0;
      for (int i = 0; i < width; ++i) sum += std::pow(value(run.o[at + i]), 2);
      const double r = rstd[t * heads + h] = 1 / std::sqrt(sum / width + 1e-6f);
      Doubles e(width);
      for (int i = 0; i < width; ++i) {
        const double z = value(run.z[z_at + i]), s = sigmoid(z), normed = value(run.o[at + i]) * r;
        const double w = value(run.w[i]), dy = value(run.dy[at + i]);
        y[at + i] = w * normed * z * s;
        d_z[at + i] = dy * w * normed * s * (1 + z * (1 - s));
        got_z[at + i] = value(grad_z[z_at + i]);
        d_w[i] += dy * z * s * normed;
        e[i] = dy * z * s * w;
        along += e[i] * normed / width;
      }
      for (int i = 0; i < width; ++i) d_o[at + i] = r * (e[i] - value(run.o[at + i]) * r * along);
    }
  std::printf("gated norm %5d x %2d x %3d ", tokens, heads, width);
  compare("y", run.y.download(), y, 3e-3);
  compare("rstd", run.rstd.download(), rstd, 1e-6);
  compare("do", run.grad_o.download(), d_o, 3e-3);
  compare("dz", std::vector<float>(got_z.begin(), got_z.end()), d_z, 3e-3);
  compare("dw", minus_one(run.grad_w.download()), d_w, 1e-5);
  std::printf("\n");
}

void bench() {
  const Shape s{"16/32 32768", {32768}, 0, 16, 32, 128, 128, true, false, false};
  const FrontData data(s);
  FrontRunner front(data);
  front.zero_sums();
  const double bytes = 32768.0 * 2 * (data.channels + 64);
  auto line = [](const char* name, Timing t, double bytes) {
    std::printf("%-22s %7.3f ms [%7.3f %7.3f]  %.2f TB/s of the least traffic\n", name, t.median,
                t.p10, t.p90, bytes / t.median * 1e-9);
  };
  line("front forward", time_graph([&](cudaStream_t c) { front.forward(c); }, 30), 2 * bytes);
  line("front backward", time_graph([&](cudaStream_t c) { front.backward(c); }, 30), 3 * bytes);
  NormRunner norm(32768, 32, 128, 64, 1);
  norm.grad_w.upload(std::vector<float>(128, 0.0f));
  const double row = 32768.0 * 32 * 128 * 2;
  line("gated norm forward", time_graph([&](cudaStream_t c) { norm.forward(c); }, 30), 3 * row);
  line("gated norm backward", time_graph([&](cudaStream_t c) { norm.backward(c); }, 30), 5 * row);
}

} // namespace

int main(int argc, char** argv) try {
  if (!have_device()) return kSkip;
  if (argc > 1 && std::strcmp(argv[1], "bench") == 0) {
    bench();
    return 0;
  }
  check_front({"one", {200}, 0, 1, 1, 128, 128, true, false, false});
  check_front(
      {"ragged", {0, 1, 2, 3, 4, 63, 64, 65, 0, 130, 5}, 9, 2, 4, 128, 128, true, false, false});
  check_front({"bias, 2 sigmoid", {61, 64, 67}, 0, 2, 2, 128, 128, true, true, true});
  check_front({"no norm", {100}, 3, 2, 6, 128, 128, false, false, false});
  check_front({"odd heads, unaligned rows", {100, 30}, 0, 1, 3, 64, 64, true, false, false});
  check_front({"96/192", {100, 30}, 5, 2, 4, 96, 192, true, true, false});
  check_front({"long", {5000}, 0, 1, 2, 128, 128, true, false, false});
  check_norm(1, 1, 128, 0, 1);
  check_norm(100, 3, 128, 64, 1);
  check_norm(333, 2, 192, 6, 1);
  check_norm(50, 4, 64, 3, 1e4);
  check_norm(50, 4, 256, 8, 1e-4);
  check_norm(6000, 8, 128, 32, 1);
  std::printf("%d failures\n", failures);
  return failures ? 5 : 0;
} catch (const Error& error) {
  std::printf("error: %s\n", error.what());
  return 1;
}
