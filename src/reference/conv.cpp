#include "reference/conv.h"

#include <algorithm>

#include "reference/activation.h"
#include "reference/detail.h"

namespace gdn::reference {
namespace {

// Taps as [taps, channels], so that loops over channels are contiguous.
template <class A> struct Taps {
  int64 taps, channels;
  std::vector<A> w, bias;
  Taps(ConstValues weight, ConstValues b, int64 n_channels)
      : taps(weight.cols), channels(n_channels), w(at(taps * n_channels)) {
    expect_shape(weight, n_channels, taps, "conv weight");
    expect_shape(b, 1, n_channels, "conv bias");
    for (int64 c = 0; c < channels; ++c)
      for (int64 k = 0; k < taps; ++k) w[at(k * channels + c)] = static_cast<A>(weight.get(c, k));
    bias = b ? load_all<A>(b) : std::vector<A>(at(channels));
  }
  // p = bias + sum over taps k of w_k x[t - (taps - 1) + k], rows before `first` read as zeros.
  template <class T> void apply(const Mat<const T>& x, int64 first, int64 t, A* p) const {
    std::copy(bias.begin(), bias.end(), p);
    for (int64 k = std::max<int64>(0, taps - 1 - (t - first)); k < taps; ++k) {
      const T* row = x.row(t - (taps - 1) + k);
      const A* wk = &w[at(k * channels)];
      for (int64 c = 0; c < channels; ++c) p[c] += wk[c] * up(row[c]);
    }
  }
};

template <class A> void activate(Activation f, int64 n, A* p) {
  if (f == Activation::Silu)
    for (int64 c = 0; c < n; ++c) p[c] = silu(p[c]);
}

// d times the slope of the activation at p.
template <class A> void activate_backward(Activation f, int64 n, const A* p, A* d) {
  if (f == Activation::Silu)
    for (int64 c = 0; c < n; ++c) d[c] *= silu_slope(p[c]);
}

} // namespace

template <class T>
void conv_forward(Activation activation, Sequences sequences, In<T> x, ConstValues weight,
                  ConstValues bias, Out<T> y) {
  using A = Acc<T>;
  check_sequences(sequences, x.rows);
  expect_shape(y, x.rows, x.cols, "conv output");
  const Taps<A> taps(weight, bias, x.cols);
  std::vector<A> p(at(x.cols));
  for (int64 s = 0; s < sequence_count(sequences); ++s)
    for (int64 t = sequences[at(s)]; t < sequences[at(s) + 1]; ++t) {
      taps.template apply<T>(x, sequences[at(s)], t, p.data());
      activate(activation, x.cols, p.data());
      store_row(p.data(), x.cols, y.row(t), Write::Overwrite);
    }
  zero_rows(y, sequences.back());
}

template <class T>
void conv_backward(Activation activation, Sequences sequences, In<T> x, ConstValues weight,
                   ConstValues bias, In<T> dy, Grad<T> dx, Values dweight, Values dbias) {
  using A = Acc<T>;
  check_sequences(sequences, x.rows);
  expect_shape(dy, x.rows, x.cols, "conv output gradient");
  expect_shape(dx, x.rows, x.cols, "conv input gradient");
  expect_shape(dweight, weight.rows, weight.cols, "conv weight gradient");
  expect_shape(dbias, 1, x.cols, "conv bias gradient");
  const Taps<A> taps(weight, bias, x.cols);
  const int64 n = x.cols, width = taps.taps;
  std::vector<A> p(at(n)), sum(at(n));
  std::vector<A> ring(at(width * n)); // gradients of the last `width` pre-activations
  std::vector<double> dw(at(width * n)), db(at(n));
  for (int64 s = 0; s < sequence_count(sequences); ++s) {
    const int64 first = sequences[at(s)], end = sequences[at(s) + 1];
    // dx of a row needs the pre-activation gradients of the row itself and width - 1 later ones.
    for (int64 t = first; t < end + width - 1; ++t) {
      if (t < end) {
        A* dp = &ring[at((t % width) * n)];
        taps.template apply<T>(x, first, t, p.data());
        load_row(dy.row(t), n, dp);
        activate_backward(activation, n, p.data(), dp);
        for (int64 c = 0; c < n; ++c) db[at(c)] += static_cast<double>(dp[c]);
        for (int64 k = std::max<int64>(0, width - 1 - (t - first)); k < width; ++k) {
          const T* row = x.row(t - (width - 1) + k);
          double* out = &dw[at(k * n)];
          for (int64 c = 0; c < n; ++c) out[c] += static_cast<double>(dp[c] * up(row[c]));
        }
      }
      const int64 done = t - (width - 1); // its last reader is row t
      if (!dx || done < first) continue;
      std::fill(sum.begin(), sum.end(), A(0));
      for (int64 k = 0; k < width; ++k) {
        const int64 reader = done + width - 1 - k;
        if (reader >= end) continue;
        const A* dp = &ring[at((reader % width) * n)];
        const A* wk = &taps.w[at(k * n)];
        for (int64 c = 0; c < n; ++c) sum[at(c)] += wk[c] * dp[c];
      }
      store_row(sum.data(), n, dx.to.row(done), dx.write);
    }
  }
  for (int64 c = 0; dweight && c < n; ++c)
    for (int64 k = 0; k < width; ++k) dweight.add(c, k, dw[at(k * n + c)]);
  for (int64 c = 0; dbias && c < n; ++c) dbias.add(c, db[at(c)]);
  zero_rows_of(dx, sequences.back());
}

template <class T>
void conv_state_from(Sequences sequences, In<T> x, std::span<const int64> slots, Out<T> pool) {
  check_sequences(sequences, x.rows);
  expect(static_cast<int64>(slots.size()) == sequence_count(sequences), "one slot a sequence");
  for (std::size_t s = 0; s < slots.size(); ++s)
    for (int64 k = 0; k < pool.cols; ++k) {
      const int64 t = sequences[s + 1] - pool.cols + k;
      for (int64 c = 0; c < x.cols; ++c)
        pool(slots[s] * x.cols + c, k) = t >= sequences[s] ? x(t, c) : T(0);
    }
}

template <class T>
void conv_continue(Activation activation, Sequences sequences, In<T> x, ConstValues weight,
                   ConstValues bias, std::span<const int64> slots, Out<T> pool, Out<T> y) {
  check_sequences(sequences, x.rows);
  expect(static_cast<int64>(slots.size()) == sequence_count(sequences), "one slot a sequence");
  const int64 taps = pool.cols;
  std::vector<T> before, after; // the state's inputs, then the sequence's; their outputs
  for (std::size_t s = 0; s < slots.size(); ++s) {
    const int64 first = sequences[s], n = sequences[s + 1] - first, rows = taps + n;
    before.resize(at(rows * x.cols));
    after.resize(before.size());
    const Mat<T> in(before.data(), rows, x.cols), out(after.data(), rows, x.cols);
    for (int64 c = 0; c < x.cols; ++c)
      for (int64 k = 0; k < taps; ++k) in(k, c) = pool(slots[s] * x.cols + c, k);
    for (int64 t = 0; t < n; ++t) std::copy_n(x.row(first + t), x.cols, in.row(taps + t));
    const int64 whole[] = {0, rows};
    conv_forward<T>(activation, whole, in, weight, bias, out);
    for (int64 t = 0; t < n; ++t) std::copy_n(out.row(taps + t), x.cols, y.row(first + t));
    for (int64 c = 0; c < x.cols; ++c)
      for (int64 k = 0; k < taps; ++k) pool(slots[s] * x.cols + c, k) = in(n + k, c);
  }
}

template <class T>
void conv_step(Activation activation, In<T> x, ConstValues weight, ConstValues bias,
               std::span<const int64> slots, Out<T> pool, Out<T> y) {
  using A = Acc<T>;
  expect_shape(pool, pool.rows, weight.cols, "conv states");
  expect_shape(y, x.rows, x.cols, "conv output");
  expect(static_cast<int64>(slots.size()) == x.rows, "one slot a request");
  const Taps<A> taps(weight, bias, x.cols);
  std::vector<A> p(at(x.cols));
  for (int64 i = 0; i < x.rows; ++i) {
    for (int64 c = 0; c < x.cols; ++c) {
      T* state = pool.row(slots[at(i)] * x.cols + c);
      std::copy(state + 1, state + taps.taps, state);
      state[taps.taps - 1] = x(i, c);
      A sum = taps.bias[at(c)];
      for (int64 k = 0; k < taps.taps; ++k) sum += taps.w[at(k * x.cols + c)] * up(state[k]);
      p[at(c)] = sum;
    }
    activate(activation, x.cols, p.data());
    store_row(p.data(), x.cols, y.row(i), Write::Overwrite);
  }
}

#define GDN_CONV(T)                                                                                \
  template void conv_forward<T>(Activation, Sequences, In<T>, ConstValues, ConstValues, Out<T>);   \
  template void conv_backward<T>(Activation, Sequences, In<T>, ConstValues, ConstValues, In<T>,    \
                                 Grad<T>, Values, Values);                                         \
  template void conv_state_from<T>(Sequences, In<T>, std::span<const int64>, Out<T>);              \
  template void conv_continue<T>(Activation, Sequences, In<T>, ConstValues, ConstValues,           \
                                 std::span<const int64>, Out<T>, Out<T>);                          \
  template void conv_step<T>(Activation, In<T>, ConstValues, ConstValues, std::span<const int64>,  \
                             Out<T>, Out<T>);
GDN_CONV(bf16)
GDN_CONV(float)
GDN_CONV(double)
#undef GDN_CONV

} // namespace gdn::reference
