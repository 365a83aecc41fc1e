#pragma once
#include <algorithm>

#include "reference/chunk.h"
#include "reference/l2row.h"
#include "reference/rule_check.h"

// From the rule's arguments to the matrices of one chunk, and back.
namespace gdn::reference {

// m rows of `from`, padded with zeros to 64.
template <class T> void load_rows(const Mat<const T>& from, Matrix<Acc<T>>& to) {
  to.setZero(kChunk, from.cols);
  for (int64 i = 0; i < from.rows; ++i) load_row(from.row(i), from.cols, to.row(i).data());
}

// Where a chunk lies.
struct Place {
  int64 sequence, index; // index of the chunk in its sequence
  int64 global;          // and over all sequences
  int64 row, rows;       // tokens row .. row + rows - 1
};

inline std::vector<Place> chunks_of(Sequences sequences) {
  std::vector<Place> places;
  for (int64 s = 0; s < sequence_count(sequences); ++s)
    for (int64 row = sequences[at(s)], c = 0; row < sequences[at(s) + 1]; row += kChunk, ++c)
      places.push_back({s, c, static_cast<int64>(places.size()), row,
                        std::min(kChunk, sequences[at(s) + 1] - row)});
  return places;
}

// Everything about one chunk that both passes load.
template <class T> class ChunkLoader {
public:
  using A = Acc<T>;
  ChunkLoader(const RuleShape& s, const RuleForward<T>& p) : shape_(s), f_(&p) {}
  ChunkLoader(const RuleShape& s, const RuleBackward<T>& p) : shape_(s), b_(&p) {}

  // q and k of a key head, normalised if asked for, and their products.
  void load_keys(const Place& c, int64 head) {
    if (f_) {
      load_one(c, head, f_->q, {}, {}, keys.q, q_rstd, f_->q_norm, f_->q_rstd);
      load_one(c, head, f_->k, {}, {}, keys.k, k_rstd, f_->k_norm, f_->k_rstd);
    } else {
      load_one(c, head, b_->q, b_->q_norm, b_->q_rstd, keys.q, q_rstd, {}, {});
      load_one(c, head, b_->k, b_->k_norm, b_->k_rstd, keys.k, k_rstd, {}, {});
    }
    keys.multiply();
  }

  // Gates, v and the gate-free inverse of a value head.
  void load_head(const Place& c, int64 head) {
    load_gates(c, head);
    const auto& values = f_ ? f_->v : b_->v;
    load_rows<T>(values.row_range(c.row, c.rows).columns(head * shape_.value_dim, shape_.value_dim),
                 v);
    if (b_ && b_->inverse) {
      load_rows<T>(b_->inverse.row_range(c.row, c.rows).columns(head * kChunk, kChunk), t_raw);
      for (int64 i = c.rows; i < kChunk; ++i) t_raw(i, i) = 1;
      return;
    }
    gate_free_inverse(keys, gates.beta, t_raw);
    for (int64 i = 0; i < kChunk; ++i) // as it is stored, kept or not
      for (int64 j = 0; j < kChunk; ++j) t_raw(i, j) = up(static_cast<T>(t_raw(i, j)));
  }

  ChunkKeys<A> keys;
  ChunkGates<A> gates;
  Matrix<A> v, t_raw;
  Column<A> q_rstd, k_rstd;

private:
  void load_one(const Place& c, int64 head, const Mat<const T>& raw, const Mat<const T>& norm,
                ConstValues rstd_in, Matrix<A>& to, Column<A>& rstd, const Mat<T>& norm_out,
                const Values& rstd_out) {
    const int64 n = shape_.key_dim;
    if (!shape_.l2norm || norm) {
      const auto& from = norm ? norm : raw;
      load_rows<T>(from.row_range(c.row, c.rows).columns(head * n, n), to);
      for (int64 i = 0; norm && i < c.rows; ++i)
        rstd(i) = static_cast<A>(rstd_in.get(c.row + i, head));
      return;
    }
    to.setZero(kChunk, n);
    for (int64 i = 0; i < c.rows; ++i) {
      A* row = to.row(i).data();
      rstd(i) = l2_normalise<T>(&raw(c.row + i, head * n), n, shape_.l2_eps, row);
      if (norm_out) store_row(row, n, &norm_out(c.row + i, head * n), Write::Overwrite);
      if (rstd_out) rstd_out.set(c.row + i, head, static_cast<double>(rstd(i)));
    }
  }

  void load_gates(const Place& c, int64 head) {
    const ConstValues g = f_ ? f_->g : b_->g, beta = f_ ? f_->beta : b_->beta;
    A sum = 0;
    for (int64 i = 0; i < kChunk; ++i) {
      const bool valid = i < c.rows;
      if (valid && b_ && b_->g_cum)
        sum = static_cast<A>(b_->g_cum.get(c.row + i, head));
      else if (valid)
        sum += static_cast<A>(g.get(c.row + i, head));
      gates.gamma(i) = sum;
      gates.beta(i) = valid ? static_cast<A>(beta.get(c.row + i, head)) : A(0);
    }
    gates.exponentiate();
  }

  const RuleShape& shape_;
  const RuleForward<T>* f_ = nullptr;
  const RuleBackward<T>* b_ = nullptr;
};

template <class T> void store_rows(const Matrix<Acc<T>>& from, const Mat<T>& to, Write write) {
  for (int64 i = 0; i < to.rows; ++i) store_row(from.row(i).data(), to.cols, to.row(i), write);
}

// The copy of the running state that products read, rounded to the storage type as it is kept.
template <class T> void round_state(const Matrix<Acc<T>>& state, Matrix<Acc<T>>& rounded) {
  rounded.resize(state.rows(), state.cols());
  for (int64 i = 0; i < state.size(); ++i) rounded.data()[i] = up(static_cast<T>(state.data()[i]));
}

template <class A>
Matrix<A> load_state(const Mat<const A>& states, int64 index, const RuleShape& s) {
  Matrix<A> m = Matrix<A>::Zero(s.key_dim, s.value_dim);
  for (int64 c = 0; states && c < s.key_dim; ++c)
    std::copy_n(states.row(index * s.key_dim + c), s.value_dim, m.row(c).data());
  return m;
}

template <class A>
void store_state(const Matrix<A>& m, const Mat<A>& states, int64 index, const RuleShape& s) {
  for (int64 c = 0; states && c < s.key_dim; ++c)
    std::copy_n(m.row(c).data(), s.value_dim, states.row(index * s.key_dim + c));
}

} // namespace gdn::reference
