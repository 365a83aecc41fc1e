#include "model/kinds/linear.h"

namespace gdn::model {

NormOutputs rms_norm(Builder& b, std::string name, TensorId x, ParamRef weight, NormAttr attr, std::string out) {
  TensorId y = b.tensor(out, b.at(x).dtype, b.at(x).shape);
  TensorId rstd = b.statistic(out + "_rstd", DType::FP32, {b.at(x).rows()});
  Op& op = b.op(std::move(name), OpKind::RmsNorm, {x}, {y, rstd}, attr);
  op.params = {std::move(weight)};
  op.steps.push_back({.name = "backward", .reads = {x, rstd}, .grad_reads = {y}, .grad_writes = {x}, .param_grads = {0}});
  return {y, rstd};
}

TensorId linear(Builder& b, std::string name, TensorId x, ParamRef weight, std::int64_t out_cols, LinearAttr attr,
                std::string out) {
  const DType dtype = b.at(x).dtype;
  return linear(b, std::move(name), x, std::move(weight), out_cols, attr, std::move(out), dtype);
}

TensorId linear(Builder& b, std::string name, TensorId x, ParamRef weight, std::int64_t out_cols, LinearAttr attr,
                std::string out, DType out_dtype) {
  const std::int64_t in_rows = b.at(x).rows(), in_cols = b.at(x).cols();
  const Bytes element = size_of(b.at(x).dtype);
  const bool gathers = attr.mode == TensorParallel::Column && attr.tp > 1 && attr.sequence_parallel;
  const bool scatters = attr.mode == TensorParallel::Row && attr.tp > 1 && attr.sequence_parallel;
  const std::int64_t gemm_rows = gathers ? in_rows * attr.tp : in_rows;
  const std::int64_t out_rows = scatters ? in_rows / attr.tp : gemm_rows;

  TensorId y = b.tensor(std::move(out), out_dtype, {out_rows, out_cols});
  Op& op = b.op(std::move(name), OpKind::Linear, {x}, {y}, attr);
  op.params = {std::move(weight)};
  Step dgrad{.name = "dgrad", .grad_reads = {y}, .grad_writes = {x}};
  Step wgrad{.name = "wgrad", .reads = {x}, .grad_reads = {y}, .param_grads = {0}};
  if (attr.bias) {
    ParamRef bias = op.params[0];
    bias.name += ".bias";
    bias.elements = out_cols;
    op.params.push_back(bias);
    wgrad.param_grads.push_back(1);
  }
  const Bytes input = gemm_rows * in_cols * element, output = gemm_rows * out_cols * size_of(out_dtype);
  if (attr.tp > 1 && attr.mode == TensorParallel::Column) {
    if (gathers) {
      op.collectives = {{CollectiveKind::AllGather, Group::Tp, attr.tp, input}};
      dgrad.collectives = {{CollectiveKind::ReduceScatter, Group::Tp, attr.tp, input}};
      wgrad.collectives = {{CollectiveKind::AllGather, Group::Tp, attr.tp, input}};
    } else {
      dgrad.collectives = {{CollectiveKind::AllReduce, Group::Tp, attr.tp, input}};
    }
  } else if (attr.tp > 1 && attr.mode == TensorParallel::Row) {
    op.collectives = {{scatters ? CollectiveKind::ReduceScatter : CollectiveKind::AllReduce, Group::Tp, attr.tp, output}};
    if (scatters) dgrad.collectives = {{CollectiveKind::AllGather, Group::Tp, attr.tp, output}};
  }
  op.model_flops = 2.0 * static_cast<double>(gemm_rows) * static_cast<double>(in_cols) * static_cast<double>(out_cols);
  op.steps = {std::move(dgrad), std::move(wgrad)};
  return y;
}

} // namespace gdn::model
