#pragma once
#include <utility>
#include <vector>

#include "core/units.h"
#include "trainer/cuda/engine.h"

struct CUevent_st;

namespace gdn::trainer::cuda {

// One allocation that grows between steps, never inside one.
class Buffer {
public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer();
  std::byte* data() const { return data_; }
  void reserve(Bytes bytes);

private:
  std::byte* data_ = nullptr;
  Bytes bytes_ = 0;
};

// Parts of a buffer, one after the other, 256-byte aligned.
class Parts {
public:
  Bytes add(Bytes bytes) { return std::exchange(end_, end_ + round_up(bytes, 256)); }
  Bytes end() const { return end_; }

private:
  Bytes end_ = 0;
};

// The data of a step's micro-batches in device memory: ids, labels, positions, the tables of chunks, and where decoding
// continues, if it does.
class StepData {
public:
  StepData() = default;
  StepData(const StepData&) = delete;
  StepData& operator=(const StepData&) = delete;
  ~StepData();

  // Everything in one copy on the engine's stream; does not wait for it. Data of the same sizes goes to the same places.
  void bring(const StepContext& context, const Engine& engine);
  const std::vector<DeviceBatch>& batches() const { return batches_; }

private:
  std::byte* stage(Bytes bytes); // pinned, free to be written

  Buffer device_;
  std::byte* host_ = nullptr;
  Bytes host_bytes_ = 0;
  CUevent_st* copied_ = nullptr;
  std::vector<DeviceBatch> batches_;
};

} // namespace gdn::trainer::cuda
