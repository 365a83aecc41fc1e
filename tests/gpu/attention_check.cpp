// Causal attention against fp64 on the CPU: packings, head widths, groups and scores that are hard on a running softmax.
//   attention_check             every case
//   attention_check quick       the first cases only (for the memory and race checkers)
//   attention_check once        one large forward and backward (for a profiler)
//   attention_check bench [N]   times of N graph replays; FLOP counted causal, backward 2.5 times the forward
// Every result must repeat bit for bit, and a document's must not depend on what it is packed with.
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "core/error.h"
#include "kernels/attention/core.h"
#include "kernels/gdn/chunk_table.h"
#include "tests/gpu/device.h"

using namespace gdn;
using namespace gdn::gpu_test;
using kernels::Matrix;

namespace {

enum class Scores { kPlain, kPeaked, kRising, kFalling, kEqual };
const char* const kScoreNames[] = {"plain", "peaked", "rising", "falling", "equal"};

struct Case {
  std::vector<int> lengths;
  int heads = 2, kv_heads = 1, dim = 256;
  Scores scores = Scores::kPlain;
  bool accumulate = false; // gradients are added to what is there
  int padding = 0;         // rows behind the last document
};

using Bits = std::vector<Bf16>;

// One call's tensors on the host, rows of `stride` elements: more than the heads take, as in a slice of a projection.
struct Tensor {
  int width = 0, stride = 0;
  Bits bits;
  Tensor() = default;
  Tensor(std::int64_t rows, int width, int gap) : width(width), stride(width + gap), bits(rows * (width + gap)) {}
  double at(std::int64_t row, int col) const { return value(bits[row * stride + col]); }
  void set(std::int64_t row, int col, double x) { bits[row * stride + col] = to_bf16(static_cast<float>(x)); }
};

struct Problem {
  Case c;
  std::vector<std::int32_t> bounds{0};
  Tensor q, k, v, o, d_o, dq, dk, dv; // o, and the gradients as they were before
  std::vector<float> lse;
  std::int64_t tokens() const { return bounds.back() + c.padding; }
};

// Sums in fp64 over the same bf16 inputs; the backward sees o rounded and lse in fp32, as the kernels do.
struct Reference {
  std::vector<double> o, lse, dq, dk, dv; // contiguous
};

Problem make_problem(const Case& c, std::uint64_t seed) {
  Problem p;
  p.c = c;
  for (int l : c.lengths) p.bounds.push_back(p.bounds.back() + l);
  const std::int64_t n = p.tokens();
  p.q = Tensor(n, c.heads * c.dim, 64);
  p.k = Tensor(n, c.kv_heads * c.dim, 8);
  p.v = Tensor(n, c.kv_heads * c.dim, 8);
  p.o = Tensor(n, c.heads * c.dim, 0);
  p.d_o = Tensor(n, c.heads * c.dim, 16);
  p.dq = Tensor(n, c.heads * c.dim, 0);
  p.dk = Tensor(n, c.kv_heads * c.dim, 24);
  p.dv = Tensor(n, c.kv_heads * c.dim, 0);
  p.lse.resize(n * c.heads);
  for (Tensor* t : {&p.q, &p.k, &p.v, &p.d_o, &p.dq, &p.dk, &p.dv}) {
    Random random{seed++ * 1000003};
    for (std::int64_t row = 0; row < n; ++row)
      for (int col = 0; col < t->width; ++col) t->set(row, col, row < p.bounds.back() ? random.normal() : 100 * random.normal());
  }
  if (c.scores == Scores::kPlain) return p;
  for (std::int64_t row = 0; row < n; ++row) {
    if (c.scores == Scores::kPeaked)
      for (int col = 0; col < p.q.width; ++col) p.q.set(row, col, 6 * p.q.at(row, col));
    else if (c.scores == Scores::kEqual)
      for (int col = 0; col < p.q.width; ++col) p.q.set(row, col, 0);
    else // one column carries a slope along the keys: maxima that grow by many powers of two from tile to tile
      for (int head = 0; head < c.heads; ++head) {
        p.q.set(row, head * c.dim, 4 * std::sqrt(c.dim));
        if (head < c.kv_heads) p.k.set(row, head * c.dim, (c.scores == Scores::kRising ? 0.05 : -0.05) * (static_cast<double>(row) - 0.5 * static_cast<double>(n)));
      }
  }
  return p;
}

Reference reference(Problem& p) {
  const Case& c = p.c;
  const std::int64_t n = p.tokens();
  const int group = c.heads / c.kv_heads, d = c.dim;
  Reference r;
  r.o.resize(n * c.heads * d), r.dq.resize(n * c.heads * d), r.lse.resize(n * c.heads);
  r.dk.resize(n * c.kv_heads * d), r.dv.resize(n * c.kv_heads * d);
  const double scale = 1 / std::sqrt(static_cast<double>(d));
  const auto one_kv_head = [&](int kv) {
    const auto dot = [&](const Tensor& a, std::int64_t i, int head_a, const Tensor& b, std::int64_t j, int head_b) {
      double sum = 0;
      for (int x = 0; x < d; ++x) sum += a.at(i, head_a * d + x) * b.at(j, head_b * d + x);
      return sum;
    };
    std::vector<double> s;
    for (int head = kv * group; head < (kv + 1) * group; ++head)
      for (std::size_t doc = 0; doc + 1 < p.bounds.size(); ++doc)
        for (std::int64_t i = p.bounds[doc]; i < p.bounds[doc + 1]; ++i) {
          const std::int64_t first = p.bounds[doc];
          s.assign(i - first + 1, 0);
          double top = -1e300, sum = 0;
          for (std::int64_t j = first; j <= i; ++j) top = std::max(top, s[j - first] = scale * dot(p.q, i, head, p.k, j, kv));
          for (double x : s) sum += std::exp(x - top);
          const double lse = r.lse[i * c.heads + head] = top + std::log(sum);
          double* o = &r.o[(i * c.heads + head) * d];
          for (std::int64_t j = first; j <= i; ++j)
            for (int x = 0; x < d; ++x) o[x] += std::exp(s[j - first] - lse) * p.v.at(j, kv * d + x);
          for (int x = 0; x < d; ++x) p.o.set(i, head * d + x, o[x]);
          p.lse[i * c.heads + head] = static_cast<float>(lse);
          const double delta = dot(p.o, i, head, p.d_o, i, head);
          double* dq = &r.dq[(i * c.heads + head) * d];
          for (std::int64_t j = first; j <= i; ++j) {
            const double weight = std::exp(s[j - first] - static_cast<double>(p.lse[i * c.heads + head]));
            const double ds = scale * weight * (dot(p.d_o, i, head, p.v, j, kv) - delta);
            double *dk = &r.dk[(j * c.kv_heads + kv) * d], *dv = &r.dv[(j * c.kv_heads + kv) * d];
            for (int x = 0; x < d; ++x) {
              dv[x] += weight * p.d_o.at(i, head * d + x);
              dk[x] += ds * p.q.at(i, head * d + x);
              dq[x] += ds * p.k.at(j, kv * d + x);
            }
          }
        }
  };
  std::vector<std::thread> threads;
  for (int kv = 0; kv < c.kv_heads; ++kv) threads.emplace_back(one_kv_head, kv);
  for (auto& t : threads) t.join();
  if (c.accumulate)
    for (const auto& [t, g] : {std::pair{&p.dq, &r.dq}, {&p.dk, &r.dk}, {&p.dv, &r.dv}})
      for (std::int64_t row = 0; row < p.bounds.back(); ++row)
        for (int col = 0; col < t->width; ++col) (*g)[row * t->width + col] += t->at(row, col);
  return r;
}

// What a problem's call reads and writes, in device memory.
class Call {
public:
  Call(const Case& c, std::int64_t tokens, const std::vector<std::int32_t>& bounds)
      : shape_{tokens, static_cast<std::int64_t>(bounds.size()) - 1, c.heads, c.kv_heads, c.dim, {}},
        accumulate_(c.accumulate), bounds_(bounds), table_(kernels::gdn_chunk_table_bytes(tokens, shape_.sequences)),
        scratch_(kernels::attention_backward_scratch(tokens, shape_.sequences, c.heads)), lse(tokens * c.heads) {
    shape_.table = kernels::gdn_chunk_table_at(table_.get(), tokens, shape_.sequences);
    context_.scratch = scratch_.get();
    context_.scratch_bytes = static_cast<std::int64_t>(scratch_.size());
    GDN_CUDA(cudaDeviceGetAttribute(&context_.sm_count, cudaDevAttrMultiProcessorCount, 0));
    kernels::gdn_chunk_table({bounds_.get(), false, tokens, shape_.sequences, shape_.table}, context_);
    GDN_CUDA(cudaDeviceSynchronize());
  }
  struct Slot {
    DeviceArray<Bf16> data;
    int stride = 0;
  };
  Slot q, k, v, o, d_o, dq, dk, dv;

  void forward(cudaStream_t stream) {
    context_.stream = stream;
    kernels::attention_forward({shape_, wide(q), narrow(k), narrow(v), wide(o), lse.get()}, context_);
  }
  void backward(cudaStream_t stream) {
    context_.stream = stream;
    kernels::attention_backward({shape_, wide(q), narrow(k), narrow(v), wide(o), lse.get(), wide(d_o), {wide(dq), accumulate_},
                                 {narrow(dk), accumulate_}, {narrow(dv), accumulate_}}, context_);
  }
  bool guards_intact() const {
    for (const Slot* s : {&q, &k, &v, &o, &d_o, &dq, &dk, &dv})
      if (!s->data.guard_intact()) return false;
    return lse.guard_intact() && scratch_.guard_intact();
  }

private:
  Matrix matrix(const Slot& s, int heads) const {
    return {s.data.get(), DType::BF16, shape_.tokens, heads * std::int64_t{shape_.dim}, s.stride};
  }
  Matrix wide(const Slot& s) const { return matrix(s, shape_.heads); }
  Matrix narrow(const Slot& s) const { return matrix(s, shape_.kv_heads); }

  kernels::AttentionShape shape_;
  bool accumulate_;
  kernels::LaunchContext context_;
  DeviceArray<std::int32_t> bounds_;
  DeviceArray<char> table_, scratch_;

public:
  DeviceArray<float> lse;
};

// Everything the two passes wrote.
struct Results {
  Tensor o, dq, dk, dv;
  std::vector<float> lse;
  bool guards = true;
};

Results run(const Problem& p) {
  Call call(p.c, p.tokens(), p.bounds);
  const auto put = [](Call::Slot& slot, const Tensor& t, bool poison = false) {
    slot = {DeviceArray<Bf16>(t.bits), t.stride};
    if (poison) slot.data.poison();
  };
  put(call.q, p.q), put(call.k, p.k), put(call.v, p.v), put(call.d_o, p.d_o);
  put(call.o, p.o, true);
  put(call.dq, p.dq, !p.c.accumulate), put(call.dk, p.dk, !p.c.accumulate), put(call.dv, p.dv, !p.c.accumulate);
  const auto take = [](const Call::Slot& slot, Tensor like) {
    like.bits = slot.data.download();
    return like;
  };
  Results r;
  call.forward(nullptr);
  GDN_CUDA(cudaDeviceSynchronize());
  r.o = take(call.o, p.o);
  r.lse = call.lse.download();
  call.o.data.upload(p.o.bits); // the backward is judged by itself
  call.lse.upload(p.lse);
  call.backward(nullptr);
  GDN_CUDA(cudaDeviceSynchronize());
  r.dq = take(call.dq, p.dq), r.dk = take(call.dk, p.dk), r.dv = take(call.dv, p.dv);
  r.guards = call.guards_intact();
  return r;
}

// |x - ref| / |ref| over the rows of documents; what is not finite counts as 1e9.
double error_of(const Tensor& t, const std::vector<double>& ref, std::int64_t rows) {
  double error = 0, norm = 0;
  for (std::int64_t row = 0; row < rows; ++row)
    for (int col = 0; col < t.width; ++col) {
      const double x = t.at(row, col), y = ref[row * t.width + col];
      if (!std::isfinite(x)) return 1e9;
      error += (x - y) * (x - y), norm += y * y;
    }
  return norm == 0 ? std::sqrt(error) : std::sqrt(error / norm);
}
// The largest error of a row, against its own norm and the rows' root mean square: a wrong row does not hide among many.
double row_error_of(const Tensor& t, const std::vector<double>& ref, std::int64_t rows) {
  std::vector<double> errors(rows), norms(rows);
  double square = 0;
  for (std::int64_t row = 0; row < rows; ++row)
    for (int col = 0; col < t.width; ++col) {
      const double y = ref[row * t.width + col], e = t.at(row, col) - y;
      errors[row] += e * e, norms[row] += y * y, square += y * y;
    }
  double worst = 0;
  for (std::int64_t row = 0; row < rows; ++row)
    if (square > 0) worst = std::max(worst, std::sqrt(errors[row]) / (std::sqrt(norms[row]) + std::sqrt(square / static_cast<double>(rows))));
  return worst;
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b, std::size_t count) {
  return std::memcmp(a.data(), b.data(), count * sizeof(T)) == 0;
}

bool check(const Case& c, std::uint64_t seed) {
  Problem p = make_problem(c, seed);
  const Reference ref = reference(p);
  const Results r = run(p), again = run(p);
  const std::int64_t rows = p.bounds.back();
  double lse = 0;
  for (std::int64_t i = 0; i < rows * c.heads; ++i) {
    const double off = std::abs(r.lse[i] - ref.lse[i]) / (1 + std::abs(ref.lse[i]));
    lse = std::isfinite(off) ? std::max(lse, off) : 1e9;
  }
  const double errors[] = {error_of(r.o, ref.o, rows), error_of(r.dq, ref.dq, rows), error_of(r.dk, ref.dk, rows), error_of(r.dv, ref.dv, rows)};
  const double by_row[] = {row_error_of(r.o, ref.o, rows), row_error_of(r.dq, ref.dq, rows), row_error_of(r.dk, ref.dk, rows),
                           row_error_of(r.dv, ref.dv, rows)};
  const bool repeats = same_bits(r.o.bits, again.o.bits, r.o.bits.size()) && same_bits(r.lse, again.lse, r.lse.size()) &&
                       same_bits(r.dq.bits, again.dq.bits, r.dq.bits.size()) && same_bits(r.dk.bits, again.dk.bits, r.dk.bits.size()) &&
                       same_bits(r.dv.bits, again.dv.bits, r.dv.bits.size());
  bool alone = true;
  if (c.lengths.size() > 1) { // the first document by itself
    Problem first = p;
    first.c.lengths.resize(1), first.c.padding = 0, first.bounds.resize(2);
    const std::size_t n = first.tokens();
    for (Tensor* t : {&first.q, &first.k, &first.v, &first.o, &first.d_o, &first.dq, &first.dk, &first.dv}) t->bits.resize(n * t->stride);
    first.lse.resize(n * c.heads);
    const Results f = run(first);
    for (const auto& [x, y] : {std::pair{&f.o, &r.o}, {&f.dq, &r.dq}, {&f.dk, &r.dk}, {&f.dv, &r.dv}})
      alone = alone && same_bits(x->bits, y->bits, n * x->stride);
    alone = alone && same_bits(f.lse, r.lse, n * c.heads);
  }
  // bf16: probabilities, their gradients and the results are rounded once each, 2^-9 at most.
  const bool close = lse < 2e-5 && *std::max_element(errors, errors + 4) < 5e-3 && *std::max_element(by_row, by_row + 4) < 1e-2;
  const bool good = close && repeats && alone && r.guards;
  std::printf("%-4s %5ld tokens in %3zu, heads %2d/%d x %3d, %-7s%s  o %.1e dq %.1e dk %.1e dv %.1e, worst row %.1e, lse %.1e%s%s%s\n",
              good ? "ok" : "FAIL", static_cast<long>(p.tokens()), c.lengths.size(), c.heads, c.kv_heads, c.dim,
              kScoreNames[static_cast<int>(c.scores)], c.accumulate ? " +=" : "   ", errors[0], errors[1], errors[2], errors[3],
              *std::max_element(by_row, by_row + 4), lse, repeats ? "" : ", does not repeat", alone ? "" : ", depends on its neighbours",
              r.guards ? "" : ", wrote past an end");
  std::fflush(stdout);
  return good;
}

// ------------------------------------------------------------------------------------------ times ----

void time_shape(const char* name, const Case& c, int replays) {
  std::vector<std::int32_t> bounds{0};
  double pairs = 0;
  for (int l : c.lengths) {
    bounds.push_back(bounds.back() + l);
    pairs += 0.5 * l * l;
  }
  const std::int64_t n = bounds.back();
  Call call(c, n, bounds);
  static const DeviceArray<Bf16> source = [] {
    Bits pool(1 << 22);
    Random random{1};
    for (auto& x : pool) x = to_bf16(static_cast<float>(random.normal()));
    return DeviceArray<Bf16>(pool);
  }();
  std::size_t shift = 0; // no two stretches of the inputs are the same for long
  const auto fill = [&](Call::Slot& slot, int heads) {
    slot.stride = heads * c.dim;
    slot.data = DeviceArray<Bf16>(n * slot.stride);
    for (std::size_t at = 0; at < slot.data.size(); shift = (shift + 12345 * 8) % (source.size() / 2)) {
      const std::size_t piece = std::min(source.size() - shift, slot.data.size() - at);
      GDN_CUDA(cudaMemcpy(slot.data.get() + at, source.get() + shift, piece * sizeof(Bf16), cudaMemcpyDeviceToDevice));
      at += piece;
    }
  };
  for (auto* slot : {&call.q, &call.o, &call.d_o, &call.dq}) fill(*slot, c.heads);
  for (auto* slot : {&call.k, &call.v, &call.dk, &call.dv}) fill(*slot, c.kv_heads);
  if (replays == 0) {
    call.forward(nullptr);
    call.backward(nullptr);
    GDN_CUDA(cudaDeviceSynchronize());
    return;
  }
  const Timing f = time_graph([&](cudaStream_t stream) { call.forward(stream); }, replays);
  const Timing b = time_graph([&](cudaStream_t stream) { call.backward(stream); }, replays);
  const double flop = 4.0 * pairs * c.heads * c.dim;
  std::printf("%2d/%d x %3d %-16s forward %7.3f ms [%.3f %.3f] %4.0f TFLOP/s   backward %7.3f ms [%.3f %.3f] %4.0f TFLOP/s\n", c.heads,
              c.kv_heads, c.dim, name, f.median, f.p10, f.p90, flop / f.median / 1e9, b.median, b.p10, b.p90, 2.5 * flop / b.median / 1e9);
  std::fflush(stdout);
}

void bench(int replays) {
  cudaDeviceProp device;
  GDN_CUDA(cudaGetDeviceProperties(&device, 0));
  std::printf("%s, CUDA-graph replay, median [p10 p90]\n", device.name);
  std::vector<int> ragged;
  Random random{11};
  for (int left = 16384; left > 0; left -= ragged.back()) ragged.push_back(std::min(left, 64 + static_cast<int>(1500 * random.uniform())));
  time_shape("2 x 8192", {{8192, 8192}, 16, 2, 256}, replays);
  time_shape("2 x 4096", {{4096, 4096}, 16, 2, 256}, replays);
  time_shape("1 x 4096", {{4096}, 16, 2, 256}, replays);
  time_shape("1 x 32768", {{32768}, 16, 2, 256}, std::max(1, replays / 4));
  time_shape("1 x 8192", {{8192}, 32, 2, 256}, replays);
  time_shape("documents", {ragged, 16, 2, 256}, replays);
  time_shape("1 x 4096", {{4096}, 32, 2, 256}, replays);
  time_shape("1 x 4096", {{4096}, 8, 1, 256}, replays); // a rank of two
  time_shape("1 x 32768", {{32768}, 8, 1, 256}, std::max(1, replays / 4));
  time_shape("documents", {ragged, 8, 1, 256}, replays);
  time_shape("2 x 8192", {{8192, 8192}, 32, 4, 128}, replays);
  time_shape("2 x 8192", {{8192, 8192}, 32, 8, 64}, replays);
}

} // namespace

int main(int argc, char** argv) try {
  if (!have_device()) return kSkip;
  const std::string mode = argc > 1 ? argv[1] : "";
  if (mode == "bench") {
    bench(argc > 2 ? std::max(1, std::atoi(argv[2])) : 20);
    return 0;
  }
  if (mode == "once") {
    time_shape("2 x 8192", {{8192, 8192}, 16, 2, 256}, 0);
    return 0;
  }
  std::vector<Case> cases = {
      {{64}, 2, 1, 256},
      {{1, 2, 63, 65, 130}, 4, 2, 256},
      {{333}, 3, 1, 128, Scores::kPeaked, true},
      {{95, 0, 97, 161}, 8, 1, 256, Scores::kRising}, // four CTAs share a tile of keys; above two, two, one
  };
  if (mode != "quick")
    for (const Case& c : std::vector<Case>{
             {{1}, 1, 1, 256},
             {{700}, 4, 2, 256, Scores::kPlain, true},
             {{700}, 4, 2, 256, Scores::kRising},
             {{700}, 4, 2, 256, Scores::kFalling},
             {{641}, 4, 2, 256, Scores::kPeaked},
             {{300, 200}, 4, 2, 256, Scores::kEqual},
             {{127, 128, 129, 191, 192, 193}, 6, 2, 256, Scores::kPlain, false, 70},
             {{64, 64, 64, 64, 320}, 5, 1, 256, Scores::kPeaked, false, 1},
             {{500}, 10, 2, 192, Scores::kRising, true},
             {{77, 400}, 7, 7, 200, Scores::kPlain, false, 64},
             {{450}, 8, 2, 128, Scores::kFalling},
             {{100, 1, 1, 1, 257}, 12, 3, 128, Scores::kPeaked, true},
             {{390}, 4, 4, 64, Scores::kRising},
             {{129, 255}, 8, 2, 72},
             {{200}, 2, 2, 8},
             {{1200}, 2, 1, 256, Scores::kPeaked},
             {{200, 130}, 16, 2, 256, Scores::kPlain, true},
             {{130, 1, 200}, 4, 1, 128, Scores::kFalling, true},
         })
      cases.push_back(c);
  int failed = 0;
  for (std::size_t i = 0; i < cases.size(); ++i) failed += !check(cases[i], 100 * (i + 1));
  std::printf("%zu cases, %d failed\n", cases.size(), failed);
  return failed == 0 ? 0 : 1;
} catch (const Error& error) {
  std::printf("error: %s\n", error.what());
  return 1;
}
