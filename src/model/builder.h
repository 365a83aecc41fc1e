#pragma once
#include <string>
#include <utility>
#include <vector>

#include "model/op.h"

namespace gdn::model {

// Writes an OpList from top to bottom. The kinds (src/model/kinds/*.h) are functions on it, one
// per op kind; a layer is a flat sequence of their calls.
class Builder {
public:
  explicit Builder(std::string list_name) { list_.name = std::move(list_name); }

  // Puts `names` in front of every op and tensor name from here on ("mtp0."), and `params` in front
  // of the names that param() makes ("mtp.0.layer.").
  void scope(std::string names, std::string params);
  const std::string& name_scope() const { return name_prefix_; }
  const std::string& param_scope() const { return param_prefix_; }
  ParamRef param(std::string local, std::int64_t elements, DType dtype) const {
    return {param_prefix_ + local, elements, dtype, !frozen_};
  }
  // From here on param() makes parameters that do not train; adapter() always makes ones that do.
  void freeze(bool frozen) { frozen_ = frozen; }
  bool frozen() const { return frozen_; }
  ParamRef adapter(std::string local, std::int64_t elements, DType dtype) const {
    return {param_prefix_ + local, elements, dtype};
  }

  // The unit's input: the residual stream. `external`: owned by the caller whatever the unit does.
  TensorId input(std::string name, DType dtype, std::vector<std::int64_t> shape, bool external = false);
  // A new tensor in a storage of its own.
  TensorId tensor(std::string name, DType dtype, std::vector<std::int64_t> shape,
                  Category category = Category::Activations);
  // A statistic, map or id: never differentiated.
  TensorId statistic(std::string name, DType dtype, std::vector<std::int64_t> shape);
  // Columns [first, first + cols(shape)) of `base`: same storage, same rows.
  TensorId view(std::string name, TensorId base, std::int64_t first, std::vector<std::int64_t> shape,
                GradientStorage gradient);
  // The same bytes under another shape.
  TensorId reshape(std::string name, TensorId base, std::vector<std::int64_t> shape, GradientStorage gradient);

  // Appends an op; its reference stays valid until the next call.
  Op& op(std::string name, OpKind kind, std::vector<TensorId> inputs, std::vector<TensorId> outputs,
         Attributes attr = {});

  void hold(TensorId tensor, HoldKind kind, int until = -1) { list_.holds.push_back({tensor, kind, until}); }
  // Holds `tensor` as a local of the frame whose last op is the latest appended one.
  void hold_frame_until_here(TensorId tensor) { hold(tensor, HoldKind::Frame, last_op()); }

  const Tensor& at(TensorId id) const { return list_.tensor(id); }
  int last_op() const { return static_cast<int>(list_.ops.size()) - 1; }
  OpList& list() { return list_; }

  // Finishes: sets the output and the token count, verifies, and hands the list over.
  OpList finish(TensorId output, std::int64_t tokens);

private:
  OpList list_;
  std::string name_prefix_, param_prefix_;
  bool frozen_ = false;
};

} // namespace gdn::model
