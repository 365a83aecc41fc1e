#include "model/megatron/adapted_linear.h"

#include <fmt/core.h>

#include "core/error.h"
#include "model/kinds/plumbing.h"

namespace gdn::model::megatron {

namespace {

// Rows of all TP ranks under sequence parallelism; backward reduces and scatters.
TensorId gather_rows(Builder& b, std::string name, TensorId x, std::int64_t tp, std::string out) {
  TensorId y = b.tensor(std::move(out), b.at(x).dtype, {b.at(x).rows() * tp, b.at(x).cols()});
  Op& op = b.op(std::move(name), OpKind::AllGather, {x}, {y});
  op.collectives = {{CollectiveKind::AllGather, Group::Tp, tp, b.at(y).bytes()}};
  op.steps.push_back({.name = "backward", .grad_reads = {y}, .grad_writes = {x},
                      .collectives = {{CollectiveKind::ReduceScatter, Group::Tp, tp, b.at(y).bytes()}}});
  return y;
}

} // namespace

TensorId adapted_linear(Builder& b, const std::string& target, std::string name, TensorId x, ParamRef weight,
                        std::int64_t out_cols, LinearAttr attr, const std::string& out, const config::Run& run) {
  if (!run.lora.on(target)) return linear(b, std::move(name), x, std::move(weight), out_cols, attr, out);
  const std::int64_t r = run.lora.rank, tp = attr.tp;
  const bool column = attr.mode == TensorParallel::Column;
  if (column && r % tp != 0)
    throw Error(ErrorCode::Config, fmt::format("lora_rank {} does not divide by tensor_model_parallel_size {}", r, tp));
  const std::string base_name = weight.name.substr(b.param_scope().size());
  const DType dtype = weight.dtype;
  const std::int64_t in_cols = b.at(x).cols();
  TensorId base = linear(b, name, x, std::move(weight), out_cols, attr, out + "_base");
  TensorId low;
  if (column) {
    TensorId in = attr.sequence_parallel && tp > 1 ? gather_rows(b, name + ".lora_gather", x, tp, out + "_lora_in") : x;
    low = linear(b, name + ".lora_a", in, b.adapter(base_name + ".lora_a", r / tp * in_cols, dtype), r / tp,
                 {TensorParallel::Column, tp, false}, out + "_lora_shard");
    if (tp > 1) low = gather_columns(b, name + ".lora_a.gather", low, tp, true, out + "_lora");
  } else {
    low = linear(b, name + ".lora_a", x, b.adapter(base_name + ".lora_a", r * in_cols, dtype), r,
                 {TensorParallel::Row, tp, attr.sequence_parallel}, out + "_lora");
  }
  TensorId added = linear(b, name + ".lora_b", low, b.adapter(base_name + ".lora_b", out_cols * r, dtype), out_cols,
                          column ? LinearAttr{TensorParallel::Column, tp, false} : LinearAttr{}, out + "_lora_out");
  return residual_add(b, name + ".lora_add", base, added, out);
}

} // namespace gdn::model::megatron
