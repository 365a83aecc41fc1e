#include "reference/rule.h"

#include <algorithm>
#include <cmath>

#include "core/units.h"
#include "reference/delta.h"
#include "reference/rule_check.h"

namespace gdn::reference {

double RuleShape::read_scale() const {
  return scale != 0 ? scale : 1 / std::sqrt(static_cast<double>(key_dim));
}

void check_rule_shape(const RuleShape& s) {
  if (s.key_heads < 1 || s.value_heads % std::max<int64>(s.key_heads, 1) != 0 || s.key_dim < 1 ||
      s.value_dim < 1)
    throw Error(ErrorCode::Config,
                "gated delta rule with " + std::to_string(s.key_heads) + " key heads of " +
                    std::to_string(s.key_dim) + " and " + std::to_string(s.value_heads) +
                    " value heads of " + std::to_string(s.value_dim),
                "value heads are a positive multiple of key heads");
}

int64 rule_backward_scratch_bytes(const RuleShape& shape, Sequences sequences, int64 element,
                                  bool states_saved) {
  if (states_saved) return 0;
  int64 chunks = 0;
  for (int64 s = 0; s < sequence_count(sequences); ++s)
    chunks = std::max(chunks, ceil_div(sequences[at(s) + 1] - sequences[at(s)], kChunk));
  return chunks * shape.repeat() * shape.key_dim * shape.value_dim * element;
}

template <class T>
void rule_step(const RuleShape& shape, const RuleForward<T>& p, std::span<const int64> slots,
               Out<Acc<T>> pool) {
  using A = Acc<T>;
  check_rule_forward(shape, p);
  expect(static_cast<int64>(slots.size()) == p.v.rows, "one slot a request");
  const int64 dk = shape.key_dim, dv = shape.value_dim, heads = shape.value_heads;
  expect(pool.cols == dv && pool.stride == dv, "state pool rows are contiguous [dk, dv] states");
  GdnToken<A> token(shape);
  std::vector<A> o(at(dv));
  for (int64 i = 0; i < p.v.rows; ++i)
    for (int64 h = 0; h < heads; ++h) {
      token.load(p, i, h);
      delta_step(token.view(), static_cast<A>(shape.read_scale()),
                 pool.row((slots[at(i)] * heads + h) * dk), o.data());
      store_row(o.data(), dv, &p.o(i, h * dv), Write::Overwrite);
    }
}

template <class T>
void rule_continue(const RuleShape& shape, Sequences sequences, const RuleForward<T>& p,
                   std::span<const int64> slots, Out<Acc<T>> pool) {
  using A = Acc<T>;
  expect(static_cast<int64>(slots.size()) == sequence_count(sequences), "one slot a sequence");
  const int64 rows = shape.value_heads * shape.key_dim; // of one state
  expect(pool.cols == shape.value_dim, "state pool rows are [value_dim]");
  std::vector<A> before(at(sequence_count(sequences) * rows * pool.cols)), after(before.size());
  const auto states = [&](std::vector<A>& v) {
    return Mat<A>(v.data(), sequence_count(sequences) * rows, pool.cols);
  };
  for (std::size_t s = 0; s < slots.size(); ++s)
    for (int64 r = 0; r < rows; ++r)
      std::copy_n(pool.row(slots[s] * rows + r), pool.cols,
                  states(before).row(static_cast<int64>(s) * rows + r));
  RuleForward<T> with = p;
  with.initial_state = states(before);
  with.final_state = states(after);
  rule_chunk_forward<T>(shape, sequences, with);
  for (std::size_t s = 0; s < slots.size(); ++s)
    for (int64 r = 0; r < rows; ++r)
      std::copy_n(states(after).row(static_cast<int64>(s) * rows + r), pool.cols,
                  pool.row(slots[s] * rows + r));
}

template void rule_continue<bf16>(const RuleShape&, Sequences, const RuleForward<bf16>&,
                                  std::span<const int64>, Out<float>);
template void rule_continue<float>(const RuleShape&, Sequences, const RuleForward<float>&,
                                   std::span<const int64>, Out<float>);
template void rule_continue<double>(const RuleShape&, Sequences, const RuleForward<double>&,
                                    std::span<const int64>, Out<double>);
template void rule_step<bf16>(const RuleShape&, const RuleForward<bf16>&, std::span<const int64>,
                              Out<float>);
template void rule_step<float>(const RuleShape&, const RuleForward<float>&, std::span<const int64>,
                               Out<float>);
template void rule_step<double>(const RuleShape&, const RuleForward<double>&,
                                std::span<const int64>, Out<double>);

} // namespace gdn::reference
