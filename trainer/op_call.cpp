#include "trainer/op_call.h"

#include <algorithm>

#include <fmt/core.h>

#include "core/error.h"
#include "trainer/comm/ranks.h"

namespace gdn::trainer {

using model::TensorId;
using program::AccessMode;

OpCall::OpCall(const model::OpList& list, const program::Event& event, std::vector<Operand> operands,
               std::vector<Parameter> parameters, std::span<std::byte> scratch, const StepContext& context,
               int micro_batch, HostTables& tables)
    : list_(list), op_(list.ops[static_cast<size_t>(event.op)]), event_(event), operands_(std::move(operands)),
      parameters_(std::move(parameters)), scratch_(scratch), context_(context), micro_batch_(micro_batch),
      tables_(tables), used_(operands_.size(), 0), used_gradient_(parameters_.size(), 0) {}

std::string OpCall::name() const { return step() < 0 ? op_.name : op_.name + "." + backward_step().name; }

Communicator& OpCall::group(model::Group kind) const {
  if (context_.ranks == nullptr)
    throw Error(ErrorCode::Internal, fmt::format("op list '{}', {}: a collective over {}, but there is one rank", list_.name, name(), model::name_of(kind)));
  return context_.ranks->group(kind);
}

std::span<const std::int64_t> OpCall::local_sequences() const {
  return batch().shards ? std::span<const std::int64_t>(batch().shards->sequences) : batch().sequences;
}
std::span<const std::int64_t> OpCall::local_positions() const {
  return batch().shards ? std::span<const std::int64_t>(batch().shards->positions) : std::span<const std::int64_t>();
}

void OpCall::undeclared(const std::string& what) const {
  throw Error(ErrorCode::Internal, fmt::format("op list '{}', {}: uses {}, which it does not declare", list_.name, name(), what));
}

const OpCall::Operand* OpCall::find(TensorId t, bool gradient, bool write) const {
  for (size_t i = 0; i < operands_.size(); ++i) {
    const program::Access& a = operands_[i].access;
    if (a.tensor != t || a.gradient != gradient) continue;
    if (gradient && (a.mode != AccessMode::Read) != write) continue;
    used_[i] = 1;
    return &operands_[i];
  }
  return nullptr;
}

View OpCall::forward(TensorId t) const {
  const Operand* o = find(t, false, false);
  if (o == nullptr) undeclared("tensor '" + list_.tensor(t).name + "'");
  return view_of(*o);
}

// A forward tensor lies in its storage as the list says. A gradient buffer is a dense copy of the
// shape of the tensor that owns it; a slice lies in it as the slice's tensor lies in the owner.
View OpCall::view_of(const Operand& o) const {
  if (o.placed) return o.placed;
  const model::Tensor& t = list_.tensor(o.access.tensor);
  View v{o.buffer, t.dtype, t.rows(), t.cols(), t.row_stride};
  if (t.rows() <= 1 && v.stride == 0) v.stride = t.cols();
  if (!o.access.gradient) {
    v.data += t.offset * size_of(t.dtype);
    return v;
  }
  const model::Tensor& owner = list_.tensor(o.named);
  std::int64_t offset = t.offset - owner.offset;
  if (owner.row_stride != owner.cols() && owner.rows() > 1) {
    if (t.row_stride != owner.row_stride)
      throw Error(ErrorCode::Internal, fmt::format("op list '{}': d:{} is a reshaped slice of the strided d:{}", list_.name,
                                                   t.name, owner.name));
    offset = offset / owner.row_stride * owner.cols() + offset % owner.row_stride;
    v.stride = owner.cols();
  } else if (o.access.tensor == o.named) {
    v.stride = t.cols();
  }
  v.data += offset * size_of(t.dtype);
  return v;
}

View OpCall::d_out(size_t i) const {
  const View v = d_out_if_any(i);
  if (!v)
    throw Error(ErrorCode::Internal, fmt::format("op list '{}', {}: nothing gives 'd:{}', which the step reads", list_.name, name(),
                                                 list_.tensor(op_.outputs[i]).name));
  return v;
}

View OpCall::d_out_if_any(size_t i) const {
  const TensorId t = op_.outputs.at(i);
  const auto& reads = backward_step().grad_reads;
  if (std::find(reads.begin(), reads.end(), t) == reads.end()) undeclared("the gradient of '" + list_.tensor(t).name + "'");
  const Operand* o = find(t, true, false);
  return o ? view_of(*o) : View{};
}

GradView OpCall::d_in(size_t i) const {
  const TensorId t = op_.inputs.at(i);
  const auto& writes = backward_step().grad_writes;
  if (std::find(writes.begin(), writes.end(), t) == writes.end()) undeclared("the gradient of '" + list_.tensor(t).name + "'");
  const Operand* o = find(t, true, true);
  return o ? GradView{view_of(*o), o->access.mode == AccessMode::Accumulate} : GradView{};
}

namespace {

View shaped(View v, std::int64_t rows, std::int64_t cols, const OpCall& call, const model::ParamRef& ref) {
  if (v.rows * v.cols != rows * cols)
    throw Error(ErrorCode::Internal, fmt::format("op '{}': parameter '{}' has {} elements, expected {} x {}", call.name(),
                                                 ref.name, v.rows * v.cols, rows, cols));
  v.rows = rows;
  v.cols = v.stride = cols;
  return v;
}

} // namespace

View OpCall::param(size_t i, std::int64_t rows, std::int64_t cols) const {
  return shaped(parameters_.at(i).value, rows, cols, *this, op_.params.at(i));
}

View OpCall::param_grad(size_t i, std::int64_t rows, std::int64_t cols) const {
  const auto& writes = backward_step().param_grads;
  if (std::find(writes.begin(), writes.end(), static_cast<int>(i)) == writes.end())
    undeclared("the gradient of parameter '" + op_.params.at(i).name + "'");
  used_gradient_[i] = 1;
  if (!parameters_[i].gradient) return {};
  return shaped(parameters_[i].gradient, rows, cols, *this, op_.params[i]);
}

std::span<std::byte> OpCall::scratch(Bytes bytes) const {
  used_scratch_ = true;
  if (static_cast<Bytes>(scratch_.size()) < bytes)
    throw Error(ErrorCode::Internal, fmt::format("op list '{}', {}: needs {} bytes of scratch, {} are declared", list_.name,
                                                 name(), bytes, scratch_.size()));
  return scratch_.first(static_cast<size_t>(bytes));
}

void OpCall::use_all() const { std::fill(used_.begin(), used_.end(), 1); }

void OpCall::check_all_used() const {
  for (size_t i = 0; i < operands_.size(); ++i)
    if (!used_[i]) {
      const program::Access& a = operands_[i].access;
      throw Error(ErrorCode::Internal, fmt::format("op list '{}', {}: declares {}'{}' but does not use it", list_.name, name(),
                                                   a.gradient ? "d:" : "", list_.tensor(a.tensor).name));
    }
  for (size_t i = 0; i < parameters_.size(); ++i)
    if (parameters_[i].gradient && !used_gradient_[i])
      throw Error(ErrorCode::Internal, fmt::format("op list '{}', {}: declares the gradient of '{}' but does not write it",
                                                   list_.name, name(), op_.params[i].name));
}

View with_rows(const OpCall& c, View v, std::int64_t rows) {
  if (!v || v.rows == rows) return v;
  const std::int64_t n = v.rows * v.cols;
  if ((v.rows > 1 && v.stride != v.cols) || n % rows != 0)
    throw Error(ErrorCode::Internal, fmt::format("{}: a strided [{}, {}] operand cannot be seen as {} rows", c.name(), v.rows, v.cols, rows));
  v.rows = rows;
  v.cols = v.stride = n / rows;
  return v;
}

} // namespace gdn::trainer
