#include <algorithm>

#include "core/units.h"
#include "reference/chunk.h"
#include "reference/l2row.h"
#include "reference/rule_check.h"

// Loads and stores around the chunk mathematics: loops over sequences, key heads, chunks and the
// value heads of a key head, in this order; the backward pass takes the chunks from last to first.
namespace gdn::reference {
namespace {

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

std::vector<Place> chunks_of(Sequences sequences) {
  std::vector<Place> places;
  for (int64 s = 0; s < sequence_count(sequences); ++s)
    for (int64 row = sequences[at(s)], c = 0; row < sequences[at(s) + 1]; row += kChunk, ++c)
      places.push_back({s, c, static_cast<int64>(places.size()), row,
                        std::min(kChunk, sequences[at(s) + 1] - row)});
  return places;
}

// Everything about one chunk that both passes load.
template <class T> class Loader {
public:
  using A = Acc<T>;
  Loader(const RuleShape& s, const RuleForward<T>& p) : shape_(s), f_(&p) {}
  Loader(const RuleShape& s, const RuleBackward<T>& p) : shape_(s), b_(&p) {}

  // q and k of a key head, normalised if asked for, and their products.
  void keys(const Place& c, int64 head) {
    if (f_) {
      one(c, head, f_->q, {}, {}, keys_.q, q_rstd, f_->q_norm, f_->q_rstd);
      one(c, head, f_->k, {}, {}, keys_.k, k_rstd, f_->k_norm, f_->k_rstd);
    } else {
      one(c, head, b_->q, b_->q_norm, b_->q_rstd, keys_.q, q_rstd, {}, {});
      one(c, head, b_->k, b_->k_norm, b_->k_rstd, keys_.k, k_rstd, {}, {});
    }
    keys_.multiply();
  }

  // Gates, v and the gate-free inverse of a value head.
  void head(const Place& c, int64 head) {
    gates(c, head);
    const auto& v = f_ ? f_->v : b_->v;
    load_rows<T>(v.row_range(c.row, c.rows).columns(head * shape_.value_dim, shape_.value_dim), v_);
    if (b_ && b_->inverse) {
      load_rows<T>(b_->inverse.row_range(c.row, c.rows).columns(head * kChunk, kChunk), t_raw_);
      for (int64 i = c.rows; i < kChunk; ++i) t_raw_(i, i) = 1;
      return;
    }
    gate_free_inverse(keys_, gates_.beta, t_raw_);
    for (int64 i = 0; i < kChunk; ++i) // as it is stored, kept or not
      for (int64 j = 0; j < kChunk; ++j) t_raw_(i, j) = up(static_cast<T>(t_raw_(i, j)));
  }

  ChunkKeys<A> keys_;
  ChunkGates<A> gates_;
  Matrix<A> v_, t_raw_;
  Column<A> q_rstd, k_rstd;

private:
  void one(const Place& c, int64 head, const Mat<const T>& raw, const Mat<const T>& norm,
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

  void gates(const Place& c, int64 head) {
    const ConstValues g = f_ ? f_->g : b_->g, beta = f_ ? f_->beta : b_->beta;
    A sum = 0;
    for (int64 i = 0; i < kChunk; ++i) {
      const bool valid = i < c.rows;
      if (valid && b_ && b_->g_cum)
        sum = static_cast<A>(b_->g_cum.get(c.row + i, head));
      else if (valid)
        sum += static_cast<A>(g.get(c.row + i, head));
      gates_.gamma(i) = sum;
      gates_.beta(i) = valid ? static_cast<A>(beta.get(c.row + i, head)) : A(0);
    }
    gates_.exponentiate();
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

// Calls work(chunks of a sequence, sequence, key head), also for empty sequences.
template <class Work>
void for_each_key_head(const RuleShape& shape, Sequences sequences, Work work) {
  const auto places = chunks_of(sequences);
  auto begin = places.begin();
  for (int64 s = 0; s < sequence_count(sequences); ++s) {
    const auto end =
        std::find_if(begin, places.end(), [&](const Place& c) { return c.sequence != s; });
    for (int64 head = 0; head < shape.key_heads; ++head)
      work(std::span<const Place>(begin, end), s, head);
    begin = end;
  }
}

} // namespace

template <class T>
void rule_chunk_forward(const RuleShape& shape, Sequences sequences, const RuleForward<T>& p) {
  using A = Acc<T>;
  check_rule_forward(shape, p);
  check_sequences(sequences, p.v.rows);
  check_rule_states(shape, sequences, p.initial_state, "initial state");
  check_rule_states(shape, sequences, p.final_state, "final state");
  const int64 dk = shape.key_dim, dv = shape.value_dim, heads = shape.value_heads;
  const int64 repeat = shape.repeat();
  expect_shape(p.chunk_states, chunk_count(sequences, kChunk) * heads * dk, dv, "chunk states");
  Loader<T> load(shape, p);
  ChunkUpdate<A> update;
  Matrix<A> s0, o;
  std::vector<Matrix<A>> states(at(repeat));
  for_each_key_head(shape, sequences, [&](std::span<const Place> chunks, int64 s, int64 key_head) {
    for (int64 r = 0; r < repeat; ++r)
      states[at(r)] = load_state(p.initial_state, s * heads + key_head * repeat + r, shape);
    for (const Place& c : chunks) {
      load.keys(c, key_head);
      for (int64 r = 0; r < repeat; ++r) {
        const int64 h = key_head * repeat + r;
        Matrix<A>& state = states[at(r)];
        load.head(c, h);
        round_state<T>(state, s0);
        if (p.chunk_states)
          store_rows<T>(s0, p.chunk_states.row_range((c.global * heads + h) * dk, dk),
                        Write::Overwrite);
        update.compute(load.keys_, load.gates_, load.t_raw_, load.v_, s0);
        chunk_output(load.keys_, load.gates_, update.u, s0, static_cast<A>(shape.read_scale()), o);
        advance_state(load.keys_, load.gates_, update.u, state);
        store_rows<T>(o, p.o.row_range(c.row, c.rows).columns(h * dv, dv), Write::Overwrite);
        store_rows<T>(load.t_raw_, p.inverse.row_range(c.row, c.rows).columns(h * kChunk, kChunk),
                      Write::Overwrite);
        for (int64 i = 0; p.g_cum && i < c.rows; ++i)
          p.g_cum.set(c.row + i, h, static_cast<double>(load.gates_.gamma(i)));
      }
    }
    for (int64 r = 0; r < repeat; ++r)
      store_state(states[at(r)], p.final_state, s * heads + key_head * repeat + r, shape);
  });
  for (const auto& m : {p.o, p.inverse, p.q_norm, p.k_norm}) zero_rows(m, sequences.back());
  for (const auto& m : {p.g_cum, p.q_rstd, p.k_rstd}) zero_rows(m, sequences.back());
}

template <class T>
void rule_chunk_backward(const RuleShape& shape, Sequences sequences, const RuleBackward<T>& p) {
  using A = Acc<T>;
  check_rule_backward(shape, p);
  check_sequences(sequences, p.v.rows);
  check_rule_states(shape, sequences, p.initial_state, "initial state");
  check_rule_states(shape, sequences, p.d_final_state, "final state gradient");
  check_rule_states(shape, sequences, p.d_initial_state, "initial state gradient");
  const int64 dk = shape.key_dim, dv = shape.value_dim, heads = shape.value_heads;
  const int64 repeat = shape.repeat();
  expect_shape(p.chunk_states, chunk_count(sequences, kChunk) * heads * dk, dv, "chunk states");

  // States of one sequence and key head, [chunk, value head, dk, dv], when the forward kept none.
  const int64 bytes =
      rule_backward_scratch_bytes(shape, sequences, sizeof(T), bool(p.chunk_states));
  std::vector<std::byte> own(p.scratch.empty() ? at(bytes) : 0);
  std::span<std::byte> scratch = p.scratch.empty() ? std::span<std::byte>(own) : p.scratch;
  expect(static_cast<int64>(scratch.size()) >= bytes,
         "scratch of the rule's backward is too small");
  const Mat<T> rebuilt(reinterpret_cast<T*>(scratch.data()),
                       bytes / (dv * static_cast<int64>(sizeof(T))), dv);

  Loader<T> load(shape, p);
  ChunkUpdate<A> update;
  ChunkGradients<A> grads;
  Matrix<A> s0, d_o, dq, dkey;
  std::vector<Matrix<A>> states(at(repeat)), d_states(at(repeat));
  for_each_key_head(shape, sequences, [&](std::span<const Place> chunks, int64 s, int64 key_head) {
    for (int64 r = 0; r < repeat; ++r) {
      const int64 index = s * heads + key_head * repeat + r;
      states[at(r)] = load_state(p.initial_state, index, shape);
      d_states[at(r)] = load_state(p.d_final_state, index, shape);
    }
    auto kept = [&](const Place& c, int64 r) {
      return p.chunk_states
                 ? p.chunk_states.row_range((c.global * heads + key_head * repeat + r) * dk, dk)
                 : Mat<const T>(rebuilt).row_range((c.index * repeat + r) * dk, dk);
    };
    for (const Place& c : chunks) {
      if (p.chunk_states) break;
      load.keys(c, key_head);
      for (int64 r = 0; r < repeat; ++r) {
        load.head(c, key_head * repeat + r);
        round_state<T>(states[at(r)], s0);
        store_rows<T>(s0, rebuilt.row_range((c.index * repeat + r) * dk, dk), Write::Overwrite);
        update.compute(load.keys_, load.gates_, load.t_raw_, load.v_, s0);
        advance_state(load.keys_, load.gates_, update.u, states[at(r)]);
      }
    }
    for (auto it = chunks.rbegin(); it != chunks.rend(); ++it) {
      const Place& c = *it;
      load.keys(c, key_head);
      dq.setZero(kChunk, dk);
      dkey.setZero(kChunk, dk);
      for (int64 r = 0; r < repeat; ++r) {
        const int64 h = key_head * repeat + r;
        load.head(c, h);
        const auto state = kept(c, r);
        s0.resize(dk, dv);
        for (int64 i = 0; i < dk; ++i) load_row(state.row(i), dv, s0.row(i).data());
        load_rows<T>(p.d_o.row_range(c.row, c.rows).columns(h * dv, dv), d_o);
        update.compute(load.keys_, load.gates_, load.t_raw_, load.v_, s0);
        grads.compute(load.keys_, load.gates_, update, s0, d_o, static_cast<A>(shape.read_scale()),
                      d_states[at(r)]);
        dq += grads.dq;
        dkey += grads.dk;
        store_rows<T>(grads.dv, p.dv.to.row_range(c.row, c.rows).columns(h * dv, dv), p.dv.write);
        for (int64 i = 0; i < c.rows; ++i) {
          if (p.dg) p.dg.put(c.row + i, h, static_cast<double>(grads.dg(i)));
          if (p.dbeta) p.dbeta.put(c.row + i, h, static_cast<double>(grads.dbeta(i)));
        }
      }
      for (int64 i = 0; shape.l2norm && i < c.rows; ++i) {
        l2_input_gradient(load.keys_.q.row(i).data(), load.q_rstd(i), dk, dq.row(i).data());
        l2_input_gradient(load.keys_.k.row(i).data(), load.k_rstd(i), dk, dkey.row(i).data());
      }
      store_rows<T>(dq, p.dq.to.row_range(c.row, c.rows).columns(key_head * dk, dk), p.dq.write);
      store_rows<T>(dkey, p.dk.to.row_range(c.row, c.rows).columns(key_head * dk, dk), p.dk.write);
    }
    for (int64 r = 0; r < repeat; ++r)
      store_state(d_states[at(r)], p.d_initial_state, s * heads + key_head * repeat + r, shape);
  });
  for (const auto& g : {p.dq, p.dk, p.dv}) zero_rows_of(g, sequences.back());
  for (const auto& g : {p.dg, p.dbeta}) zero_rows_of(g, sequences.back());
}

#define GDN_CHUNKED(T)                                                                             \
  template void rule_chunk_forward<T>(const RuleShape&, Sequences, const RuleForward<T>&);         \
  template void rule_chunk_backward<T>(const RuleShape&, Sequences, const RuleBackward<T>&);
GDN_CHUNKED(bf16)
GDN_CHUNKED(float)
GDN_CHUNKED(double)
#undef GDN_CHUNKED

} // namespace gdn::reference
