#include "trainer/cuda/recording.h"

#include <cuda_runtime_api.h>

#include "core/error.h"
#include "kernels/common/check.h"

namespace gdn::trainer::cuda {

namespace {

// The engine works on another step's data for a while.
class WithBatches {
public:
  WithBatches(Engine& engine, const std::vector<DeviceBatch>& batches) : engine_(engine), before_(std::exchange(engine.batches, batches)) {}
  ~WithBatches() { engine_.batches = std::move(before_); }

private:
  Engine& engine_;
  std::vector<DeviceBatch> before_;
};

cudaGraph_t capture(const std::function<void()>& pass, cudaStream_t stream) {
  cudaGraph_t graph = nullptr;
  GDN_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  try {
    pass();
  } catch (...) {
    cudaStreamEndCapture(stream, &graph);
    if (graph) cudaGraphDestroy(graph);
    cudaGetLastError(); // the error that counts is on its way
    throw;
  }
  GDN_CUDA(cudaStreamEndCapture(stream, &graph));
  return graph;
}

} // namespace

GraphRecording::GraphRecording(const StepContext& context, const std::function<void()>& pass, Engine& engine) : engine_(engine) {
  data_.bring(context, engine);
  const WithBatches mine(engine, data_.batches());
  pass(); // loads modules and plans products, which a capture must not
  const cudaGraph_t graph = capture(pass, engine.stream);
  const cudaError_t status = cudaGraphInstantiate(&graph_, graph, 0);
  GDN_CUDA_NOTHROW(cudaGraphDestroy(graph));
  GDN_CUDA(status);
}

GraphRecording::~GraphRecording() {
  GDN_CUDA_NOTHROW(cudaStreamSynchronize(engine_.stream));
  GDN_CUDA_NOTHROW(cudaGraphExecDestroy(graph_));
}

void GraphRecording::replay(const StepContext& context) {
  const std::vector<DeviceBatch>& mine = data_.batches();
  bool same = context.micro_batches.size() == mine.size();
  for (size_t i = 0; same && i < mine.size(); ++i)
    same = static_cast<std::int64_t>(context.micro_batches[i].ids.size()) == mine[i].tokens &&
           static_cast<std::int64_t>(context.micro_batches[i].sequences.size()) == mine[i].sequences + 1;
  if (!same) throw Error(ErrorCode::Internal, "a recorded pass is replayed on data of other sizes");
  data_.bring(context, engine_);
  GDN_CUDA(cudaGraphLaunch(graph_, engine_.stream));
}

} // namespace gdn::trainer::cuda
