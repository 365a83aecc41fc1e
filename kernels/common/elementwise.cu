#include "kernels/common/elementwise.h"

#include "kernels/common/matrix.cuh"

namespace gdn::kernels {

Matrix row_range(const Matrix& m, std::int64_t first, std::int64_t count) {
  Matrix r = m;
  if (r.data) r.data = static_cast<char*>(m.data) + first * m.stride * size_of(m.dtype);
  r.rows = count;
  return r;
}

namespace {

struct CopyParams {
  Matrix from;
  Gradient to;
};
template <int N>
struct Copy {
  CopyParams p;
  __device__ void operator()(std::int64_t r, std::int64_t c) const {
    put_values<N>(p.to, r, c, load_values<N>(p.from, r, c));
  }
};

struct AddParams {
  Matrix a, b, y;
};
template <int N>
struct Add {
  AddParams p;
  __device__ void operator()(std::int64_t r, std::int64_t c) const {
    Values<N> a = load_values<N>(p.a, r, c);
    const Values<N> b = load_values<N>(p.b, r, c);
#pragma unroll
    for (int i = 0; i < N; ++i) a.x[i] += b.x[i];
    store_values<N>(p.y, r, c, a);
  }
};

struct ScaleParams {
  float factor;
  Matrix x, by_row;
  Gradient to;
};
template <int N>
struct Scale {
  ScaleParams p;
  __device__ void operator()(std::int64_t r, std::int64_t c) const {
    Values<N> x = load_values<N>(p.x, r, c);
    const float f = p.by_row.data ? p.factor * load_value(p.by_row, r, 0) : p.factor;
#pragma unroll
    for (int i = 0; i < N; ++i) x.x[i] *= f;
    put_values<N>(p.to, r, c, x);
  }
};

struct FillParams {
  Gradient to;
  float value;
};
template <int N>
struct Fill {
  FillParams p;
  __device__ void operator()(std::int64_t r, std::int64_t c) const {
    Values<N> v;
#pragma unroll
    for (int i = 0; i < N; ++i) v.x[i] = p.value;
    put_values<N>(p.to, r, c, v);
  }
};

struct SiluParams {
  Matrix x, y;
};
template <int N>
struct Silu {
  SiluParams p;
  __device__ void operator()(std::int64_t r, std::int64_t c) const {
    Values<N> x = load_values<N>(p.x, r, c);
#pragma unroll
    for (int i = 0; i < N; ++i) x.x[i] *= sigmoid(x.x[i]);
    store_values<N>(p.y, r, c, x);
  }
};

struct SiluBackwardParams {
  Matrix x, dy;
  Gradient dx;
};
template <int N>
struct SiluBackward {
  SiluBackwardParams p;
  __device__ void operator()(std::int64_t r, std::int64_t c) const {
    const Values<N> x = load_values<N>(p.x, r, c);
    Values<N> d = load_values<N>(p.dy, r, c);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float s = sigmoid(x.x[i]);
      d.x[i] *= s * (1.0f + x.x[i] * (1.0f - s));
    }
    put_values<N>(p.dx, r, c, d);
  }
};

struct GateParams {
  Matrix x, gate, y;
  bool silu; // x silu(gate), else x sigmoid(gate)
};
template <int N>
struct Gate {
  GateParams p;
  __device__ void operator()(std::int64_t r, std::int64_t c) const {
    Values<N> x = load_values<N>(p.x, r, c);
    const Values<N> g = load_values<N>(p.gate, r, c);
#pragma unroll
    for (int i = 0; i < N; ++i) x.x[i] *= p.silu ? g.x[i] * sigmoid(g.x[i]) : sigmoid(g.x[i]);
    store_values<N>(p.y, r, c, x);
  }
};

struct GateBackwardParams {
  Matrix x, gate, dy;
  Gradient dx, dgate;
  bool silu;
};
template <int N>
struct GateBackward {
  GateBackwardParams p;
  __device__ void operator()(std::int64_t r, std::int64_t c) const {
    const Values<N> x = load_values<N>(p.x, r, c), g = load_values<N>(p.gate, r, c),
                    d = load_values<N>(p.dy, r, c);
    Values<N> dx, dg;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float s = sigmoid(g.x[i]);
      dx.x[i] = d.x[i] * (p.silu ? g.x[i] * s : s);
      dg.x[i] = d.x[i] * x.x[i] * s * (p.silu ? 1.0f + g.x[i] * (1.0f - s) : sigmoid(-g.x[i]));
    }
    if (p.dx.to.data) put_values<N>(p.dx, r, c, dx);
    if (p.dgate.to.data) put_values<N>(p.dgate, r, c, dg);
  }
};

struct RepeatParams {
  Matrix x;
  std::int64_t width, repeat;
  Matrix y;
};
template <int N>
struct Repeat { // over the columns of x
  RepeatParams p;
  __device__ void operator()(std::int64_t r, std::int64_t c) const {
    const Values<N> x = load_values<N>(p.x, r, c);
    const std::int64_t head = c / p.width, first = head * p.repeat * p.width + c % p.width;
    for (std::int64_t i = 0; i < p.repeat; ++i) store_values<N>(p.y, r, first + i * p.width, x);
  }
};

struct RepeatBackwardParams {
  Matrix dy;
  std::int64_t width, repeat;
  Gradient dx;
};
template <int N>
struct RepeatBackward {
  RepeatBackwardParams p;
  __device__ void operator()(std::int64_t r, std::int64_t c) const {
    const std::int64_t head = c / p.width, first = head * p.repeat * p.width + c % p.width;
    Values<N> sum = load_values<N>(p.dy, r, first);
    for (std::int64_t i = 1; i < p.repeat; ++i) {
      const Values<N> d = load_values<N>(p.dy, r, first + i * p.width);
#pragma unroll
      for (int j = 0; j < N; ++j) sum.x[j] += d.x[j];
    }
    put_values<N>(p.dx, r, c, sum);
  }
};

struct SplitParams {
  Matrix x, high, low;
};
template <int N>
struct Split {
  SplitParams p;
  __device__ void operator()(std::int64_t r, std::int64_t c) const {
    const Values<N> x = load_values<N>(p.x, r, c);
    Values<N> low;
#pragma unroll
    for (int i = 0; i < N; ++i) low.x[i] = x.x[i] - RowVector<8>::widen(RowVector<8>::narrow(x.x[i]));
    store_values<N>(p.high, r, c, x);
    store_values<N>(p.low, r, c, low);
  }
};

} // namespace

void copy(const Matrix& from, const Gradient& to, const LaunchContext& context) {
  for_rows<Copy>(CopyParams{from, to}, from.rows, from.cols, vector_matrices({from, to.to}), context, "copy");
}
void add(const Matrix& a, const Matrix& b, const Matrix& y, const LaunchContext& context) {
  for_rows<Add>(AddParams{a, b, y}, y.rows, y.cols, vector_matrices({a, b, y}), context, "add");
}
void scale(float factor, const Matrix& x, const Matrix& by_row, const Gradient& to, const LaunchContext& context) {
  for_rows<Scale>(ScaleParams{factor, x, by_row, to}, x.rows, x.cols, vector_matrices({x, to.to}), context, "scale");
}
void fill(const Gradient& to, float value, const LaunchContext& context) {
  for_rows<Fill>(FillParams{to, value}, to.to.rows, to.to.cols, vector_matrices({to.to}), context, "fill");
}
void silu_forward(const Matrix& x, const Matrix& y, const LaunchContext& context) {
  for_rows<Silu>(SiluParams{x, y}, x.rows, x.cols, vector_matrices({x, y}), context, "silu_forward");
}
void silu_backward(const Matrix& x, const Matrix& dy, const Gradient& dx, const LaunchContext& context) {
  for_rows<SiluBackward>(SiluBackwardParams{x, dy, dx}, x.rows, x.cols, vector_matrices({x, dy, dx.to}), context, "silu_backward");
}
namespace {
void gate_forward(const GateParams& p, const LaunchContext& context) {
  for_rows<Gate>(p, p.x.rows, p.x.cols, vector_matrices({p.x, p.gate, p.y}), context, "gate_forward");
}
void gate_backward(const GateBackwardParams& p, const LaunchContext& context) {
  for_rows<GateBackward>(p, p.x.rows, p.x.cols, vector_matrices({p.x, p.gate, p.dy, p.dx.to, p.dgate.to}), context, "gate_backward");
}
} // namespace
void sigmoid_gate_forward(const Matrix& x, const Matrix& gate, const Matrix& y, const LaunchContext& context) {
  gate_forward({x, gate, y, false}, context);
}
void sigmoid_gate_backward(const Matrix& x, const Matrix& gate, const Matrix& dy, const Gradient& dx,
                           const Gradient& dgate, const LaunchContext& context) {
  gate_backward({x, gate, dy, dx, dgate, false}, context);
}
void silu_gate_forward(const Matrix& x, const Matrix& z, const Matrix& y, const LaunchContext& context) {
  gate_forward({x, z, y, true}, context);
}
void silu_gate_backward(const Matrix& x, const Matrix& z, const Matrix& dy, const Gradient& dx, const Gradient& dz,
                        const LaunchContext& context) {
  gate_backward({x, z, dy, dx, dz, true}, context);
}
void repeat_heads_forward(const Matrix& x, std::int64_t width, std::int64_t repeat, const Matrix& y,
                          const LaunchContext& context) {
  for_rows<Repeat>(RepeatParams{x, width, repeat, y}, x.rows, x.cols, width % 8 == 0 && vector_matrices({x, y}), context,
                   "repeat_heads_forward");
}
void repeat_heads_backward(const Matrix& dy, std::int64_t width, std::int64_t repeat, const Gradient& dx,
                           const LaunchContext& context) {
  for_rows<RepeatBackward>(RepeatBackwardParams{dy, width, repeat, dx}, dx.to.rows, dx.to.cols,
                           width % 8 == 0 && vector_matrices({dy, dx.to}), context, "repeat_heads_backward");
}
void split_bf16(const Matrix& x, const Matrix& high, const Matrix& low, const LaunchContext& context) {
  for_rows<Split>(SplitParams{x, high, low}, x.rows, x.cols, vector_matrices({x, high, low}), context, "split_bf16");
}

} // namespace gdn::kernels
