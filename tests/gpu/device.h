// Small helpers of the GPU checks: device buffers and graph timing.
#pragma once
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include "kernels/common/check.h"
#include "tests/gpu/numbers.h"

namespace gdn::gpu_test {

inline constexpr int kSkip = 77; // exit status Meson shows as SKIP

inline bool have_device() {
  int count = 0;
  const bool ok = cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
  cudaGetLastError();
  if (!ok) std::printf("no CUDA device\n");
  return ok;
}

// Device memory with a guard band behind it, filled with 0xff (NaN as bf16 and fp32).
template <class T>
class DeviceArray {
public:
  DeviceArray() = default;
  explicit DeviceArray(std::size_t count) : count_(count) {
    void* memory = nullptr;
    GDN_CUDA(cudaMalloc(&memory, count * sizeof(T) + kGuard));
    data_ = static_cast<T*>(memory);
    poison();
  }
  explicit DeviceArray(const std::vector<T>& host) : DeviceArray(host.size()) { upload(host); }
  DeviceArray(DeviceArray&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), count_(other.count_) {}
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }
  ~DeviceArray() { cudaFree(data_); }

  T* get() const { return data_; }
  std::size_t size() const { return count_; }
  void poison() { GDN_CUDA(cudaMemset(data_, 0xff, count_ * sizeof(T) + kGuard)); }
  void upload(const std::vector<T>& host) {
    GDN_CUDA(cudaMemcpy(data_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
    GDN_CUDA(cudaStreamSynchronize(nullptr)); // a short copy from pageable memory returns before it arrived, and streams may not wait for it
  }
  std::vector<T> download() const {
    std::vector<T> host(count_);
    GDN_CUDA(cudaMemcpy(host.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
  }
  bool guard_intact() const {
    std::vector<unsigned char> band(kGuard);
    GDN_CUDA(cudaMemcpy(band.data(), reinterpret_cast<char*>(data_) + count_ * sizeof(T), kGuard,
                        cudaMemcpyDeviceToHost));
    return std::all_of(band.begin(), band.end(), [](unsigned char c) { return c == 0xff; });
  }

private:
  static constexpr std::size_t kGuard = 1024;
  T* data_ = nullptr;
  std::size_t count_ = 0;
};

// Median, 10th and 90th percentile of the replay time of the work `launch` puts on a stream, in ms.
struct Timing {
  double median, p10, p90;
};
inline Timing time_graph(const std::function<void(cudaStream_t)>& launch, int replays) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  GDN_CUDA(cudaStreamCreate(&stream));
  launch(stream); // loads modules before the capture
  GDN_CUDA(cudaStreamSynchronize(stream));
  GDN_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  launch(stream);
  GDN_CUDA(cudaStreamEndCapture(stream, &graph));
  GDN_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  std::vector<cudaEvent_t> events(replays + 1);
  for (auto& event : events) GDN_CUDA(cudaEventCreate(&event));
  for (int i = 0; i < 3; ++i) GDN_CUDA(cudaGraphLaunch(executable, stream));
  GDN_CUDA(cudaEventRecord(events[0], stream));
  for (int i = 0; i < replays; ++i) {
    GDN_CUDA(cudaGraphLaunch(executable, stream));
    GDN_CUDA(cudaEventRecord(events[i + 1], stream));
  }
  GDN_CUDA(cudaStreamSynchronize(stream));
  std::vector<float> ms(replays);
  for (int i = 0; i < replays; ++i)
    GDN_CUDA(cudaEventElapsedTime(&ms[i], events[i], events[i + 1]));
  std::sort(ms.begin(), ms.end());
  for (auto& event : events) cudaEventDestroy(event);
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  return {ms[replays / 2], ms[replays / 10], ms[replays * 9 / 10]};
}

} // namespace gdn::gpu_test
