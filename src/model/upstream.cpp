#include "model/provider.h"

namespace gdn::model {

namespace {

// What a Megatron user runs: FLA, Transformer Engine, cuBLAS, PyTorch.
class Upstream final : public Provider {
public:
  std::string_view name() const override { return "upstream"; }
  Work work(const OpList& list, const Op& op, int step) const override;
};

// FLA bc3b101d chunk_gated_delta_rule with q and k at Hv heads; chunk states h per 64 tokens.
Work rule(const OpList& list, const Op& op, int step) {
  const GdnAttr& a = std::get<GdnAttr>(op.attr);
  const Tensor& v = list.tensor(op.inputs[2]);
  const std::int64_t rows = v.rows(), chunks = ceil_div(rows, 64);
  const std::int64_t k_row = a.value_heads * a.key_dim, v_row = a.value_heads * a.value_dim;
  const Bytes states = 2 * a.value_heads * a.key_dim * a.value_dim * chunks; // bf16
  Work w;
  w.family = Family::Rule;
  if (step < 0) w.scratch = rows * (2 * k_row + 4 * v_row) + states; // w; u, v_new; h
  else w.scratch = rows * (6 * k_row + 6 * v_row + 4 * a.value_heads) + 2 * states; // w, dw, dk2; u, v_new, du; dg2; h, dh
  return w;
}

Work Upstream::work(const OpList& list, const Op& op, int step) const {
  switch (op.kind) {
  case OpKind::Rule: return rule(list, op, step);
  case OpKind::L2Norm: {
    Work w;
    if (step < 0) w.scratch = list.tensor(op.inputs[0]).bytes(); // contiguous q|k copy
    return w;
  }
  default: return {};
  }
}

} // namespace

const Provider& upstream_provider() {
  static const Upstream provider;
  return provider;
}

} // namespace gdn::model
