#include "trainer/cpu/states.h"

#include <algorithm>

namespace gdn::trainer::cpu {

namespace {

size_t at(std::int64_t i) { return static_cast<size_t>(i); }

template <class T> void copy_rows(Mat<const T> from, std::int64_t first, std::int64_t count, Mat<T> to, std::int64_t to_first) {
  for (std::int64_t r = 0; r < count; ++r) std::copy_n(from.row(first + r), from.cols, to.row(to_first + r));
}

bool one_token_each(Sequences sequences) {
  for (size_t s = 0; s + 1 < sequences.size(); ++s)
    if (sequences[s + 1] - sequences[s] != 1) return false;
  return true;
}

// Calls `step(sequence, token)` for every token in order.
template <class Step> void for_each_token(Sequences sequences, Step step) {
  for (size_t s = 0; s + 1 < sequences.size(); ++s)
    for (std::int64_t t = sequences[s]; t < sequences[s + 1]; ++t) step(s, t);
}

template <class T> Mat<const T> row_of(Mat<const T> m, std::int64_t t) { return m.row_range(t, 1); }
reference::ConstValues row_of(reference::ConstValues v, std::int64_t t) {
  return {static_cast<const std::byte*>(v.data) + t * v.stride * size_of(v.type), v.type, 1, v.cols, v.stride};
}

constexpr std::int64_t kOneToken[] = {0, 1};

} // namespace

std::vector<std::int64_t> positions_of(const SequenceStates& states, Sequences sequences) {
  std::vector<std::int64_t> positions;
  for_each_token(sequences, [&](size_t s, std::int64_t t) { positions.push_back(states.positions[s] + t - sequences[s]); });
  return positions;
}

template <class T>
void conv_states(const SequenceStates& st, reference::Activation activation, Sequences sequences, Mat<const T> x, reference::ConstValues weight,
                 reference::ConstValues bias, Mat<T> y) {
  const Mat<T> pool = mat<T>(st.conv), after = mat<T>(st.token_conv);
  if (!after) {
    if (one_token_each(sequences)) reference::conv_step<T>(activation, x, weight, bias, st.slots, pool, y);
    else reference::conv_continue<T>(activation, sequences, x, weight, bias, st.slots, pool, y);
    return;
  }
  for_each_token(sequences, [&](size_t s, std::int64_t t) {
    reference::conv_step<T>(activation, row_of(x, t), weight, bias, st.slots.subspan(s, 1), pool, y.row_range(t, 1));
    copy_rows<T>(pool, st.slots[s] * x.cols, x.cols, after, t * x.cols);
  });
}

template <class T> void rule_states(const SequenceStates& st, const reference::RuleShape& shape, Sequences sequences, reference::RuleForward<T> p) {
  using A = Acc<T>;
  const Mat<A> pool = mat<A>(st.recurrent), after = mat<A>(st.token_recurrent);
  if (!after && !one_token_each(sequences)) return reference::rule_continue<T>(shape, sequences, p, st.slots, pool);
  const std::int64_t rows = shape.value_heads * shape.key_dim;
  for_each_token(sequences, [&](size_t s, std::int64_t t) {
    reference::RuleForward<T> one;
    one.q = row_of(p.q, t);
    one.k = row_of(p.k, t);
    one.v = row_of(p.v, t);
    one.g = row_of(p.g, t);
    one.beta = row_of(p.beta, t);
    one.o = p.o.row_range(t, 1);
    reference::rule_step<T>(shape, one, st.slots.subspan(s, 1), pool);
    if (after) copy_rows<A>(pool, st.slots[s] * rows, rows, after, t * rows);
  });
}

// The recurrence is the only form of GDN2 here, so one token a time costs nothing more.
template <class T> void gdn2_states(const SequenceStates& st, const reference::RuleShape& shape, Sequences sequences, reference::Gdn2Forward<T> p) {
  using A = Acc<T>;
  const Mat<A> pool = mat<A>(st.recurrent), after = mat<A>(st.token_recurrent);
  const std::int64_t rows = shape.value_heads * shape.key_dim;
  for_each_token(sequences, [&](size_t s, std::int64_t t) {
    reference::Gdn2Forward<T> one;
    one.q = row_of(p.q, t);
    one.k = row_of(p.k, t);
    one.v = row_of(p.v, t);
    one.g = row_of(p.g, t);
    one.b = row_of(p.b, t);
    one.w = row_of(p.w, t);
    one.o = p.o.row_range(t, 1);
    const Mat<A> state = pool.row_range(st.slots[s] * rows, rows);
    one.initial_state = state; // read before the final state is written
    one.final_state = state;
    reference::gdn2_forward<T>(shape, kOneToken, one);
    if (after) copy_rows<A>(state, 0, rows, after, t * rows);
  });
}

template <class T>
void attention_states(const SequenceStates& st, const reference::AttentionShape& shape, Sequences sequences, Mat<const T> q, Mat<const T> k,
                      Mat<const T> v, Mat<T> o, reference::Values lse) {
  const Mat<T> keys = mat<T>(st.keys), values = mat<T>(st.values);
  std::vector<std::int64_t> offsets{0}; // of every request's keys, this pass included
  for (size_t s = 0; s + 1 < sequences.size(); ++s) {
    const std::int64_t n = sequences[s + 1] - sequences[s], first = st.slots[s] * st.capacity + st.positions[s];
    copy_rows<T>(k, sequences[s], n, keys, first);
    copy_rows<T>(v, sequences[s], n, values, first);
    offsets.push_back(offsets.back() + st.positions[s] + n);
  }
  std::vector<T> gathered_k(at(offsets.back() * keys.cols)), gathered_v(at(offsets.back() * values.cols));
  const Mat<T> all_k(gathered_k.data(), offsets.back(), keys.cols), all_v(gathered_v.data(), offsets.back(), values.cols);
  for (size_t s = 0; s + 1 < sequences.size(); ++s) {
    copy_rows<T>(keys, st.slots[s] * st.capacity, offsets[s + 1] - offsets[s], all_k, offsets[s]);
    copy_rows<T>(values, st.slots[s] * st.capacity, offsets[s + 1] - offsets[s], all_v, offsets[s]);
  }
  const std::vector<std::int64_t> positions = positions_of(st, sequences);
  reference::attention_forward<T>(shape, {sequences, offsets, positions}, q, all_k, all_v, o, lse);
}

#define GDN_STATES(T)                                                                                                    \
  template void conv_states<T>(const SequenceStates&, reference::Activation, Sequences, Mat<const T>,                    \
                               reference::ConstValues, reference::ConstValues, Mat<T>);                                  \
  template void rule_states<T>(const SequenceStates&, const reference::RuleShape&, Sequences, reference::RuleForward<T>); \
  template void gdn2_states<T>(const SequenceStates&, const reference::RuleShape&, Sequences, reference::Gdn2Forward<T>); \
  template void attention_states<T>(const SequenceStates&, const reference::AttentionShape&, Sequences, Mat<const T>,    \
                                    Mat<const T>, Mat<const T>, Mat<T>, reference::Values);
GDN_STATES(bf16)
GDN_STATES(float)
GDN_STATES(double)
#undef GDN_STATES

} // namespace gdn::trainer::cpu
