#pragma once
#include <functional>
#include <memory>

#include "trainer/cuda/step_data.h"
#include "trainer/device.h"

struct CUgraphExec_st;

namespace gdn::trainer::cuda {

// A pass as a CUDA graph, with the data of its micro-batches in memory of its own.
class GraphRecording final : public Recording {
public:
  // Runs the pass, then captures it. The engine outlives this.
  GraphRecording(const StepContext& context, const std::function<void()>& pass, Engine& engine);
  ~GraphRecording() override;
  void replay(const StepContext& context) override;

private:
  Engine& engine_;
  StepData data_;
  CUgraphExec_st* graph_ = nullptr;
};

} // namespace gdn::trainer::cuda
