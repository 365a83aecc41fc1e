#include "reference/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "reference/product.h"

namespace gdn::reference {
namespace {

constexpr int64 kQueryBlock = 64;

double scale_of(const AttentionShape& s) {
  return s.scale != 0 ? s.scale : 1 / std::sqrt(static_cast<double>(s.head_dim));
}

void check(const AttentionShape& s, const AttentionRows& rows, int64 queries, int64 keys) {
  if (s.kv_heads < 1 || s.heads < 1 || s.heads % s.kv_heads != 0)
    throw Error(ErrorCode::Config,
                "attention with " + std::to_string(s.heads) + " heads and " +
                    std::to_string(s.kv_heads) + " key/value heads",
                "heads are a positive multiple of key/value heads");
  check_sequences(rows.queries, queries);
  check_sequences(rows.keys, keys);
  expect(rows.queries.size() == rows.keys.size(), "as many query as key sequences");
  expect(rows.positions.empty() || static_cast<int64>(rows.positions.size()) == queries,
         "one position a query row");
}

// A block of query rows of one sequence and the keys it can see.
struct Block {
  int64 row, rows;            // query rows
  int64 key, keys;            // key rows: all of the sequence
  std::vector<int64> visible; // per query row: keys 0 .. visible - 1
};

template <class Work> void for_each_block(const AttentionRows& r, int64 s, Work work) {
  const int64 first = r.queries[at(s)], end = r.queries[at(s) + 1];
  const int64 key = r.keys[at(s)], length = r.keys[at(s) + 1] - key;
  for (int64 row = first; row < end; row += kQueryBlock) {
    Block b{row, std::min(kQueryBlock, end - row), key, 0, {}};
    for (int64 i = row; i < row + b.rows; ++i) {
      const int64 position = r.positions.empty() ? i - first : r.positions[at(i)];
      expect(position >= 0 && position < length, "query position inside its sequence");
      b.visible.push_back(position + 1);
      b.keys = std::max(b.keys, position + 1);
    }
    work(b);
  }
}

// Scaled scores of a block, then their softmax in place; hidden keys get probability 0.
template <class A, class T>
void scores(const Block& b, double scale, const Mat<const T>& q, const Mat<const T>& k,
            const Mat<A>& out) {
  product<A, T, T>(b.rows, b.keys, q.cols, plain(q), transposed(k), nullptr, out, Write::Overwrite);
  for (int64 i = 0; i < b.rows; ++i)
    for (int64 j = 0; j < b.keys; ++j) out(i, j) *= static_cast<A>(scale);
}

template <class A> A log_sum_exp(const A* x, int64 n) {
  A top = -std::numeric_limits<A>::infinity(), sum = 0;
  for (int64 j = 0; j < n; ++j) top = std::max(top, x[j]);
  for (int64 j = 0; j < n; ++j) sum += std::exp(x[j] - top);
  return top + std::log(sum);
}

template <class A> void probabilities(A* x, int64 visible, int64 keys, A lse) {
  for (int64 j = 0; j < visible; ++j) x[j] = std::exp(x[j] - lse);
  std::fill(x + visible, x + keys, A(0));
}

} // namespace

template <class T>
void attention_forward(const AttentionShape& shape, const AttentionRows& rows, In<T> q, In<T> k,
                       In<T> v, Out<T> o, Values lse) {
  using A = Acc<T>;
  const int64 d = shape.head_dim, group = shape.heads / std::max<int64>(shape.kv_heads, 1);
  check(shape, rows, q.rows, k.rows);
  expect_shape(q, q.rows, shape.heads * d, "q");
  expect_shape(k, k.rows, shape.kv_heads * d, "k");
  expect_shape(v, k.rows, shape.kv_heads * d, "v");
  expect_shape(o, q.rows, shape.heads * d, "attention output");
  expect_shape(lse, q.rows, shape.heads, "log sum exp");
  std::vector<A> buffer;
  for (int64 s = 0; s < sequence_count(rows.queries); ++s)
    for (int64 h = 0; h < shape.heads; ++h)
      for_each_block(rows, s, [&](const Block& b) {
        buffer.resize(at(b.rows * b.keys));
        const Mat<A> p(buffer.data(), b.rows, b.keys);
        const auto keys = k.row_range(b.key, b.keys).columns(h / group * d, d);
        const auto values = v.row_range(b.key, b.keys).columns(h / group * d, d);
        scores<A, T>(b, scale_of(shape), q.row_range(b.row, b.rows).columns(h * d, d), keys, p);
        for (int64 i = 0; i < b.rows; ++i) {
          const A l = log_sum_exp(p.row(i), b.visible[at(i)]);
          if (lse) lse.set(b.row + i, h, static_cast<double>(l));
          probabilities(p.row(i), b.visible[at(i)], b.keys, l);
        }
        product<T, A, T>(b.rows, d, b.keys, plain(Mat<const A>(p)), plain(values), nullptr,
                         o.row_range(b.row, b.rows).columns(h * d, d), Write::Overwrite);
      });
  zero_rows(o, rows.queries.back());
  zero_rows(lse, rows.queries.back());
}

template <class T>
void attention_backward(const AttentionShape& shape, const AttentionRows& rows,
                        const AttentionBackward<T>& g) {
  using A = Acc<T>;
  const int64 d = shape.head_dim, group = shape.heads / std::max<int64>(shape.kv_heads, 1);
  check(shape, rows, g.q.rows, g.k.rows);
  for (const auto& m : {g.q, g.o, g.d_o, Mat<const T>(g.dq.to)})
    expect_shape(m, g.q.rows, shape.heads * d, "q, o or a gradient of them");
  for (const auto& m : {g.k, g.v, Mat<const T>(g.dk.to), Mat<const T>(g.dv.to)})
    expect_shape(m, g.k.rows, shape.kv_heads * d, "k, v or a gradient of them");
  expect_shape(g.lse, g.q.rows, shape.heads, "log sum exp");
  std::vector<A> p_buffer, z_buffer, dk_buffer, dv_buffer;
  for (int64 s = 0; s < sequence_count(rows.queries); ++s) {
    const int64 key = rows.keys[at(s)], length = rows.keys[at(s) + 1] - key;
    for (int64 kv = 0; kv < shape.kv_heads; ++kv) {
      dk_buffer.assign(at(length * d), 0); // sums over the query heads of the group
      dv_buffer.assign(at(length * d), 0);
      const Mat<A> dk(dk_buffer.data(), length, d), dv(dv_buffer.data(), length, d);
      for (int64 h = kv * group; h < (kv + 1) * group; ++h)
        for_each_block(rows, s, [&](const Block& b) {
          p_buffer.resize(at(b.rows * b.keys));
          z_buffer.resize(at(b.rows * b.keys));
          const Mat<A> p(p_buffer.data(), b.rows, b.keys), z(z_buffer.data(), b.rows, b.keys);
          const auto q = g.q.row_range(b.row, b.rows).columns(h * d, d);
          const auto o = g.o.row_range(b.row, b.rows).columns(h * d, d);
          const auto d_o = g.d_o.row_range(b.row, b.rows).columns(h * d, d);
          const auto keys = g.k.row_range(b.key, b.keys).columns(kv * d, d);
          const auto values = g.v.row_range(b.key, b.keys).columns(kv * d, d);
          scores<A, T>(b, scale_of(shape), q, keys, p);
          product<A, T, T>(b.rows, b.keys, d, plain(d_o), transposed(values), nullptr, z,
                           Write::Overwrite); // dP
          for (int64 i = 0; i < b.rows; ++i) {
            const int64 visible = b.visible[at(i)];
            const A l =
                g.lse ? static_cast<A>(g.lse.get(b.row + i, h)) : log_sum_exp(p.row(i), visible);
            probabilities(p.row(i), visible, b.keys, l);
            A delta = 0;
            for (int64 j = 0; j < d; ++j) delta += up(d_o(i, j)) * up(o(i, j));
            for (int64 j = 0; j < b.keys; ++j)
              z(i, j) = p(i, j) * (z(i, j) - delta) * static_cast<A>(scale_of(shape));
          }
          if (g.dq)
            product<T, A, T>(b.rows, d, b.keys, plain(Mat<const A>(z)), plain(keys), nullptr,
                             g.dq.to.row_range(b.row, b.rows).columns(h * d, d), g.dq.write);
          product<A, A, T>(b.keys, d, b.rows, transposed(Mat<const A>(z)), plain(q), nullptr,
                           dk.row_range(0, b.keys), Write::Accumulate);
          product<A, A, T>(b.keys, d, b.rows, transposed(Mat<const A>(p)), plain(d_o), nullptr,
                           dv.row_range(0, b.keys), Write::Accumulate);
        });
      for (int64 i = 0; i < length; ++i) {
        if (g.dk) store_row(dk.row(i), d, &g.dk.to(key + i, kv * d), g.dk.write);
        if (g.dv) store_row(dv.row(i), d, &g.dv.to(key + i, kv * d), g.dv.write);
      }
    }
  }
  zero_rows_of(g.dq, rows.queries.back());
  zero_rows_of(g.dk, rows.keys.back());
  zero_rows_of(g.dv, rows.keys.back());
}

template <class T>
void rope(const Rope& r, Sequences sequences, std::span<const int64> positions, In<T> x,
          Grad<T> y) {
  using A = Acc<T>;
  expect(r.head_dim > 0 && x.cols % r.head_dim == 0 && r.rotary % 2 == 0 && r.rotary <= r.head_dim,
         "rotary width is even and at most the head width, heads fill the columns");
  check_sequences(sequences, x.rows);
  expect_shape(y, x.rows, x.cols, "rotated heads");
  expect(positions.empty() || static_cast<int64>(positions.size()) == x.rows, "one position a row");
  const int64 half = r.rotary / 2;
  std::vector<A> cosine(at(half)), sine(at(half));
  for (int64 s = 0; s < sequence_count(sequences); ++s)
    for (int64 t = sequences[at(s)]; t < sequences[at(s) + 1]; ++t) {
      const auto position =
          static_cast<double>(positions.empty() ? t - sequences[at(s)] : positions[at(t)]);
      for (int64 i = 0; i < half; ++i) {
        const double angle = position * std::pow(r.theta, -2.0 * static_cast<double>(i) /
                                                              static_cast<double>(r.rotary));
        cosine[at(i)] = static_cast<A>(std::cos(angle));
        sine[at(i)] = static_cast<A>(r.inverse ? -std::sin(angle) : std::sin(angle));
      }
      for (int64 head = 0; head < x.cols; head += r.head_dim) {
        for (int64 i = 0; i < half; ++i) {
          const A a = up(x(t, head + i)), b = up(x(t, head + half + i));
          store(y.to(t, head + i), a * cosine[at(i)] - b * sine[at(i)], y.write);
          store(y.to(t, head + half + i), b * cosine[at(i)] + a * sine[at(i)], y.write);
        }
        for (int64 i = r.rotary; i < r.head_dim; ++i)
          store(y.to(t, head + i), up(x(t, head + i)), y.write);
      }
    }
  zero_rows_of(y, sequences.back());
}

#define GDN_ATTENTION(T)                                                                           \
  template void attention_forward<T>(const AttentionShape&, const AttentionRows&, In<T>, In<T>,    \
                                     In<T>, Out<T>, Values);                                       \
  template void attention_backward<T>(const AttentionShape&, const AttentionRows&,                 \
                                      const AttentionBackward<T>&);                                \
  template void rope<T>(const Rope&, Sequences, std::span<const int64>, In<T>, Grad<T>);
GDN_ATTENTION(bf16)
GDN_ATTENTION(float)
GDN_ATTENTION(double)
#undef GDN_ATTENTION

} // namespace gdn::reference
