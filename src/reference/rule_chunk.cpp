#include <algorithm>

#include "reference/chunk.h"
#include "reference/chunk_loader.h"

// Loops over sequences, key heads, chunks and the value heads of a key head, in this order; the
// backward pass takes the chunks from last to first.
namespace gdn::reference {
namespace {

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
  ChunkLoader<T> loader(shape, p);
  ChunkUpdate<A> update;
  Matrix<A> s0, o;
  std::vector<Matrix<A>> states(at(repeat));
  for_each_key_head(shape, sequences, [&](std::span<const Place> chunks, int64 s, int64 key_head) {
    for (int64 r = 0; r < repeat; ++r)
      states[at(r)] = load_state(p.initial_state, s * heads + key_head * repeat + r, shape);
    for (const Place& c : chunks) {
      loader.load_keys(c, key_head);
      for (int64 r = 0; r < repeat; ++r) {
        const int64 h = key_head * repeat + r;
        Matrix<A>& state = states[at(r)];
        loader.load_head(c, h);
        round_state<T>(state, s0);
        if (p.chunk_states)
          store_rows<T>(s0, p.chunk_states.row_range((c.global * heads + h) * dk, dk),
                        Write::Overwrite);
        update.compute(loader.keys, loader.gates, loader.t_raw, loader.v, s0);
        chunk_output(loader.keys, loader.gates, update.u, s0, static_cast<A>(shape.read_scale()),
                     o);
        advance_state(loader.keys, loader.gates, update.u, state);
        store_rows<T>(o, p.o.row_range(c.row, c.rows).columns(h * dv, dv), Write::Overwrite);
        store_rows<T>(loader.t_raw, p.inverse.row_range(c.row, c.rows).columns(h * kChunk, kChunk),
                      Write::Overwrite);
        for (int64 i = 0; p.g_cum && i < c.rows; ++i)
          p.g_cum.set(c.row + i, h, static_cast<double>(loader.gates.gamma(i)));
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

  ChunkLoader<T> loader(shape, p);
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
      loader.load_keys(c, key_head);
      for (int64 r = 0; r < repeat; ++r) {
        loader.load_head(c, key_head * repeat + r);
        round_state<T>(states[at(r)], s0);
        store_rows<T>(s0, rebuilt.row_range((c.index * repeat + r) * dk, dk), Write::Overwrite);
        update.compute(loader.keys, loader.gates, loader.t_raw, loader.v, s0);
        advance_state(loader.keys, loader.gates, update.u, states[at(r)]);
      }
    }
    for (auto it = chunks.rbegin(); it != chunks.rend(); ++it) {
      const Place& c = *it;
      loader.load_keys(c, key_head);
      dq.setZero(kChunk, dk);
      dkey.setZero(kChunk, dk);
      for (int64 r = 0; r < repeat; ++r) {
        const int64 h = key_head * repeat + r;
        loader.load_head(c, h);
        const auto state = kept(c, r);
        s0.resize(dk, dv);
        for (int64 i = 0; i < dk; ++i) load_row(state.row(i), dv, s0.row(i).data());
        load_rows<T>(p.d_o.row_range(c.row, c.rows).columns(h * dv, dv), d_o);
        update.compute(loader.keys, loader.gates, loader.t_raw, loader.v, s0);
        grads.compute(loader.keys, loader.gates, update, s0, d_o,
                      static_cast<A>(shape.read_scale()), d_states[at(r)]);
        dq += grads.dq;
        dkey += grads.dk;
        store_rows<T>(grads.dv, p.dv.to.row_range(c.row, c.rows).columns(h * dv, dv), p.dv.write);
        for (int64 i = 0; i < c.rows; ++i) {
          if (p.dg) p.dg.put(c.row + i, h, static_cast<double>(grads.dg(i)));
          if (p.dbeta) p.dbeta.put(c.row + i, h, static_cast<double>(grads.dbeta(i)));
        }
      }
      for (int64 i = 0; shape.l2norm && i < c.rows; ++i) {
        l2_input_gradient(loader.keys.q.row(i).data(), loader.q_rstd(i), dk, dq.row(i).data());
        l2_input_gradient(loader.keys.k.row(i).data(), loader.k_rstd(i), dk, dkey.row(i).data());
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
