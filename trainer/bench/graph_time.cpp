#include "trainer/bench/graph_time.h"

#include <memory>
#include <vector>

#include <cuda_runtime_api.h>

#include "kernels/common/check.h"
#include "trainer/telemetry.h"

namespace gdn::trainer::bench {

namespace {

struct StreamDeleter {
  void operator()(CUstream_st* s) const { GDN_CUDA_NOTHROW(cudaStreamDestroy(s)); }
};
struct GraphDeleter {
  void operator()(CUgraph_st* g) const { GDN_CUDA_NOTHROW(cudaGraphDestroy(g)); }
};
struct GraphExecDeleter {
  void operator()(CUgraphExec_st* g) const { GDN_CUDA_NOTHROW(cudaGraphExecDestroy(g)); }
};
struct EventDeleter {
  void operator()(CUevent_st* e) const { GDN_CUDA_NOTHROW(cudaEventDestroy(e)); }
};
using Event = std::unique_ptr<CUevent_st, EventDeleter>;

Event make_event() {
  cudaEvent_t event = nullptr;
  GDN_CUDA(cudaEventCreate(&event));
  return Event(event);
}

} // namespace

Seconds graph_time(const std::function<void(CUstream_st*)>& launch, int replays) {
  cudaStream_t raw_stream = nullptr;
  GDN_CUDA(cudaStreamCreate(&raw_stream));
  const std::unique_ptr<CUstream_st, StreamDeleter> stream(raw_stream);
  launch(stream.get()); // loads modules before the capture
  GDN_CUDA(cudaStreamSynchronize(stream.get()));
  GDN_CUDA(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal));
  launch(stream.get());
  cudaGraph_t raw_graph = nullptr;
  GDN_CUDA(cudaStreamEndCapture(stream.get(), &raw_graph));
  const std::unique_ptr<CUgraph_st, GraphDeleter> graph(raw_graph);
  cudaGraphExec_t raw_exec = nullptr;
  GDN_CUDA(cudaGraphInstantiate(&raw_exec, graph.get(), 0));
  const std::unique_ptr<CUgraphExec_st, GraphExecDeleter> exec(raw_exec);
  std::vector<Event> events;
  for (int i = 0; i <= replays; ++i) events.push_back(make_event());
  for (int i = 0; i < 3; ++i) GDN_CUDA(cudaGraphLaunch(exec.get(), stream.get()));
  GDN_CUDA(cudaEventRecord(events[0].get(), stream.get()));
  for (int i = 0; i < replays; ++i) {
    GDN_CUDA(cudaGraphLaunch(exec.get(), stream.get()));
    GDN_CUDA(cudaEventRecord(events[static_cast<size_t>(i) + 1].get(), stream.get()));
  }
  GDN_CUDA(cudaStreamSynchronize(stream.get()));
  std::vector<double> seconds;
  for (size_t i = 0; i + 1 < events.size(); ++i) {
    float ms = 0;
    GDN_CUDA(cudaEventElapsedTime(&ms, events[i].get(), events[i + 1].get()));
    seconds.push_back(static_cast<double>(ms) * 1e-3);
  }
  return quantiles(seconds).median;
}

} // namespace gdn::trainer::bench
