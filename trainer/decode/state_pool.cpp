#include "trainer/decode/state_pool.h"

#include <algorithm>

#include <fmt/format.h>

#include "core/error.h"

namespace gdn::trainer {

using config::LayerKind;

namespace {

Bytes bytes_of(const View& v) { return v.rows * v.cols * size_of(v.dtype); }

} // namespace

StatePool::StatePool(const config::Model& model, const config::Run& run, Device& device, std::int64_t slots, std::int64_t capacity)
    : device_(device), capacity_(capacity), lengths_(static_cast<size_t>(std::max<std::int64_t>(slots, 0)), 0) {
  if (slots < 1 || capacity < 1)
    throw Error(ErrorCode::Config, fmt::format("decoding: {} slots of {} tokens; both are at least 1", slots, capacity));
  const DType state = run.dtype == DType::FP64 ? DType::FP64 : DType::FP32;
  Bytes total = 0;
  for (LayerKind kind : model.mixers) {
    SequenceStates s;
    s.capacity = capacity;
    auto add = [&](View& view, DType dtype, std::int64_t rows, std::int64_t cols) {
      view = {nullptr, dtype, checked_mul(slots, rows), cols, cols};
      total = checked_add(total, round_up(bytes_of(view), kTensorAlignment));
    };
    if (kind == LayerKind::Attention) {
      add(s.keys, run.dtype, capacity, model.attention.kv_heads * model.attention.head_dim);
      add(s.values, run.dtype, capacity, model.attention.kv_heads * model.attention.head_dim);
    } else {
      add(s.conv, run.dtype, model.gdn.conv_channels(), model.gdn.conv_kernel);
      add(s.recurrent, state, model.gdn.value_heads * model.gdn.key_head_dim, model.gdn.value_head_dim);
    }
    layers_.push_back(s);
  }
  memory_ = DeviceMemory(device, total, fmt::format("the states of {} requests of {} tokens", slots, capacity));
  std::byte* at = memory_.data();
  for (SequenceStates& s : layers_)
    for (View* v : {&s.keys, &s.values, &s.conv, &s.recurrent})
      if (v->rows > 0) {
        v->data = at;
        at += round_up(bytes_of(*v), kTensorAlignment);
      }
  device_.fill(memory_.data(), total, 0);
}

void StatePool::reset(std::int64_t slot) {
  set_length(slot, 0);
  for (const SequenceStates& s : layers_)
    for (const View& v : {s.conv, s.recurrent}) { // keys and values count from the length
      const Bytes one = bytes_of(v) / slots();
      if (v) device_.fill(v.data + slot * one, one, 0);
    }
}

} // namespace gdn::trainer
