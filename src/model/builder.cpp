#include "model/builder.h"

#include "core/error.h"

namespace gdn::model {

void Builder::scope(std::string names, std::string params) {
  name_prefix_ = std::move(names);
  param_prefix_ = std::move(params);
}

TensorId Builder::tensor(std::string name, DType dtype, std::vector<std::int64_t> shape, Category category) {
  Tensor t;
  t.name = name_prefix_ + name;
  t.dtype = dtype;
  t.shape = std::move(shape);
  std::int64_t elements = 1;
  for (std::int64_t d : t.shape) elements = checked_mul(elements, d);
  t.row_stride = t.cols();
  t.storage = static_cast<StorageId>(list_.storages.size());
  list_.storages.push_back({t.name, checked_mul(elements, size_of(dtype)), category, false});
  list_.tensors.push_back(std::move(t));
  return static_cast<TensorId>(list_.tensors.size()) - 1;
}

TensorId Builder::input(std::string name, DType dtype, std::vector<std::int64_t> shape, bool external) {
  TensorId id = tensor(std::move(name), dtype, std::move(shape));
  list_.storages.back().external = external;
  list_.input = id;
  return id;
}

TensorId Builder::statistic(std::string name, DType dtype, std::vector<std::int64_t> shape) {
  TensorId id = tensor(std::move(name), dtype, std::move(shape));
  list_.tensors.back().differentiable = false;
  return id;
}

TensorId Builder::view(std::string name, TensorId base, std::int64_t first, std::vector<std::int64_t> shape,
                       GradientStorage gradient) {
  Tensor t = at(base);
  t.name = name_prefix_ + name;
  t.shape = std::move(shape);
  t.offset += first;
  t.base = base;
  t.gradient = gradient;
  list_.tensors.push_back(std::move(t));
  return static_cast<TensorId>(list_.tensors.size()) - 1;
}

TensorId Builder::reshape(std::string name, TensorId base, std::vector<std::int64_t> shape,
                          GradientStorage gradient) {
  TensorId id = view(std::move(name), base, 0, std::move(shape), gradient);
  Tensor& t = list_.tensors.back();
  if (t.rows() != at(base).rows()) t.row_stride = t.cols();
  return id;
}

Op& Builder::op(std::string name, OpKind kind, std::vector<TensorId> inputs, std::vector<TensorId> outputs,
                Attributes attr) {
  Op op;
  op.name = name_prefix_ + name;
  op.kind = kind;
  op.attr = std::move(attr);
  op.inputs = std::move(inputs);
  op.outputs = std::move(outputs);
  list_.ops.push_back(std::move(op));
  return list_.ops.back();
}

OpList Builder::finish(TensorId output, std::int64_t tokens) {
  list_.output = output;
  list_.tokens = tokens;
  verify(list_);
  return std::move(list_);
}

} // namespace gdn::model
