#include "reference/rule_rounded.h"

#include "reference/chunk_loader.h"
#include "reference/product.h"

// Symbols as in chunk.h. The grouping is the textbook one, T = (I + M)^-1 and U = T B R, whatever a
// kernel keeps in place of T.
namespace gdn::reference {
namespace {

using Real = Matrix<double>;

double rounded(double x) { return static_cast<double>(round_to_bf16(x)); }
Real rounded(Real m) {
  for (int64 i = 0; i < m.size(); ++i) m.data()[i] = rounded(m.data()[i]);
  return m;
}
Real transposed(const Real& m) { return m.transpose(); }
Real product(const Real& a, const Real& b) {
  Real out = Real::Zero(a.rows(), b.cols());
  tile_product(a.rows(), b.cols(), a.cols(), 1.0, a.data(), b.data(), out.data());
  return out;
}
Real rows_times(const Column<double>& factor, Real m) {
  for (int64 i = 0; i < m.rows(); ++i) m.row(i) *= factor(i);
  return m;
}

void store(const Real& from, const Mat<double>& to, Write write) {
  for (int64 i = 0; i < to.rows; ++i)
    for (int64 j = 0; j < to.cols; ++j) to(i, j) = rounded(from(i, j) + (write == Write::Accumulate ? to(i, j) : 0));
}

// One chunk of one value head, from the state that enters it.
struct RoundedChunk {
  Real s, r, t, u, p; // p: s tril(Q K^T) * Lambda

  RoundedChunk(const ChunkLoader<double>& in, const Real& state, double scale) {
    const auto& [gamma, beta, decay, tail, total, lambda] = in.gates;
    s = rounded(state);
    r = in.v - rows_times(decay, product(in.keys.k, s));
    t = rounded(Real(lambda.cwiseProduct(in.t_raw)));
    u = rounded(product(t, rounded(rows_times(beta, r))));
    p = rounded(Real(scale * lambda.cwiseProduct(in.keys.qk)));
  }
  // The state that leaves it.
  Real advanced(const ChunkLoader<double>& in, const Real& state) const {
    return in.gates.total * state + product(transposed(in.keys.k), rounded(rows_times(in.gates.tail, u)));
  }
};

// Keys as the kernel's products read them.
void load_keys(ChunkLoader<double>& in, const Place& c, int64 head) {
  in.load_keys(c, head);
  in.keys.q = rounded(in.keys.q);
  in.keys.k = rounded(in.keys.k);
  in.keys.multiply();
}

// Gradients of one chunk and value head; d_state is that of the state behind it, then of the one before.
struct RoundedGradients {
  Real dq, dk, dv;
  Column<double> dg, dbeta;

  RoundedGradients(const ChunkLoader<double>& in, const RoundedChunk& h, const Real& d_o, double scale, Real& d_state) {
    const auto& [q, k, qk, kk] = in.keys;
    const auto& [gamma, beta, decay, tail, total, lambda] = in.gates;
    const Real d = rounded(d_state);
    const Real du = rounded(Real(product(transposed(h.p), d_o) + rows_times(tail, product(k, d))));
    const Real exact_e = product(transposed(h.t), du), e = rounded(exact_e);
    dv = rounded(rows_times(beta, exact_e));
    Real da = product(d_o, transposed(h.u)), dm = product(e, transposed(h.u)), dkk = Real::Zero(kChunk, kChunk), w = dkk;
    for (int64 i = 0; i < kChunk; ++i) {
      dbeta(i) = e.row(i).dot(h.r.row(i));
      for (int64 j = 0; j < kChunk; ++j) da(i, j) *= scale * lambda(i, j);
      for (int64 j = 0; j < i; ++j) {
        dm(i, j) *= -lambda(i, j);
        dbeta(i) += dm(i, j) * kk(i, j);
        dkk(i, j) = dm(i, j) * beta(i);
        w(i, j) = da(i, j) * qk(i, j) + dkk(i, j) * kk(i, j);
      }
    }
    const Real read = scale * rows_times(decay, product(d_o, transposed(h.s)));
    const Real missed = rows_times(decay, product(dv, transposed(h.s)));
    const Real fed = rows_times(tail, product(h.u, transposed(d)));
    dq = read + product(rounded(da), k);
    dk = fed - missed + product(transposed(rounded(da)), q) + product(rounded(Real(dkk + transposed(dkk))), k);

    const double through_state = total * h.s.cwiseProduct(d).sum();
    for (int64 t = 0; t < kChunk; ++t) { // pairs that straddle t
      double sum = through_state;
      for (int64 i = 0; i < kChunk; ++i) sum += i >= t ? q.row(i).dot(read.row(i)) - k.row(i).dot(missed.row(i)) : k.row(i).dot(fed.row(i));
      for (int64 i = t; i < kChunk; ++i)
        for (int64 j = 0; j < t; ++j) sum += w(i, j);
      dg(t) = sum;
    }
    d_state = total * d_state + product(transposed(q), rounded(Real(scale * rows_times(decay, d_o)))) -
              product(transposed(k), rounded(rows_times(decay, dv)));
  }
};

// The chunks of every sequence and key head.
template <class Work> void for_each_key_head(const RuleShape& shape, Sequences sequences, Work work) {
  const auto places = chunks_of(sequences);
  for (int64 s = 0; s < sequence_count(sequences); ++s) {
    std::vector<Place> mine;
    for (const Place& c : places)
      if (c.sequence == s) mine.push_back(c);
    for (int64 head = 0; head < shape.key_heads; ++head) work(mine, s, head);
  }
}

} // namespace

void rule_rounded_forward(const RuleShape& shape, Sequences sequences, const RuleForward<double>& p) {
  check_rule_forward(shape, p);
  check_sequences(sequences, p.v.rows);
  const int64 dv = shape.value_dim, repeat = shape.repeat();
  ChunkLoader<double> in(shape, p);
  for_each_key_head(shape, sequences, [&](const std::vector<Place>& chunks, int64 s, int64 key_head) {
    for (int64 h = key_head * repeat; h < (key_head + 1) * repeat; ++h) {
      Real state = load_state(p.initial_state, s * shape.value_heads + h, shape);
      for (const Place& c : chunks) {
        load_keys(in, c, key_head);
        in.load_head(c, h);
        const RoundedChunk chunk(in, state, shape.read_scale());
        const Real o = shape.read_scale() * rows_times(in.gates.decay, product(in.keys.q, chunk.s)) + product(chunk.p, chunk.u);
        store(o, p.o.row_range(c.row, c.rows).columns(h * dv, dv), Write::Overwrite);
        store(in.t_raw, p.inverse.row_range(c.row, c.rows).columns(h * kChunk, kChunk), Write::Overwrite);
        for (int64 i = 0; p.g_cum && i < c.rows; ++i) p.g_cum.set(c.row + i, h, in.gates.gamma(i));
        state = chunk.advanced(in, state);
      }
      store_state(state, p.final_state, s * shape.value_heads + h, shape);
    }
  });
}

void rule_rounded_backward(const RuleShape& shape, Sequences sequences, const RuleBackward<double>& p) {
  check_rule_backward(shape, p);
  check_sequences(sequences, p.v.rows);
  const int64 dk = shape.key_dim, dv = shape.value_dim, repeat = shape.repeat();
  ChunkLoader<double> in(shape, p);
  for_each_key_head(shape, sequences, [&](const std::vector<Place>& chunks, int64 s, int64 key_head) {
    std::vector<Real> dq(chunks.size(), Real::Zero(kChunk, dk)), dkey = dq;
    for (int64 h = key_head * repeat; h < (key_head + 1) * repeat; ++h) {
      const int64 index = s * shape.value_heads + h;
      std::vector<Real> states{load_state(p.initial_state, index, shape)};
      for (const Place& c : chunks) {
        load_keys(in, c, key_head);
        in.load_head(c, h);
        states.push_back(RoundedChunk(in, states.back(), shape.read_scale()).advanced(in, states.back()));
      }
      Real d_state = load_state(p.d_final_state, index, shape), d_o;
      for (size_t n = chunks.size(); n-- > 0;) {
        const Place& c = chunks[n];
        load_keys(in, c, key_head);
        in.load_head(c, h);
        load_rows<double>(p.d_o.row_range(c.row, c.rows).columns(h * dv, dv), d_o);
        const RoundedGradients g(in, RoundedChunk(in, states[n], shape.read_scale()), d_o, shape.read_scale(), d_state);
        dq[n] += g.dq;
        dkey[n] += g.dk;
        store(g.dv, p.dv.to.row_range(c.row, c.rows).columns(h * dv, dv), p.dv.write);
        for (int64 i = 0; i < c.rows; ++i) {
          if (p.dg) p.dg.put(c.row + i, h, g.dg(i));
          if (p.dbeta) p.dbeta.put(c.row + i, h, g.dbeta(i));
        }
      }
      store_state(d_state, p.d_initial_state, index, shape);
    }
    for (size_t n = 0; n < chunks.size(); ++n) {
      const Place& c = chunks[n];
      load_keys(in, c, key_head);
      for (int64 i = 0; shape.l2norm && i < c.rows; ++i) {
        l2_input_gradient(in.keys.q.row(i).data(), in.q_rstd(i), dk, dq[n].row(i).data());
        l2_input_gradient(in.keys.k.row(i).data(), in.k_rstd(i), dk, dkey[n].row(i).data());
      }
      store(dq[n], p.dq.to.row_range(c.row, c.rows).columns(key_head * dk, dk), p.dq.write);
      store(dkey[n], p.dk.to.row_range(c.row, c.rows).columns(key_head * dk, dk), p.dk.write);
    }
  });
}

} // namespace gdn::reference
