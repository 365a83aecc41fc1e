#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/units.h"

// What a GPU and its links can do. Every figure in a profile names its source; peaks are dense.
namespace gdn::config {

// One measured or fitted efficiency: achieved share of the peak of the op's limiting resource.
// `family` is the op family of src/model/provider.h ("gemm", "grouped_gemm", "attention", "rule",
// "elementwise", ...), `pass` "forward" | "backward" | "any". A row with `size` is one point of a
// table in that size (FLOPs or bytes of one op); rows are interpolated in log(size). Rows with `op` hold for
// those ops alone, and go before those of the family without.
struct EfficiencyRow {
  std::string provider;  // upstream | own | cpu
  std::string family, pass;     // pass may also be "dgrad" | "wgrad", one part of "backward"
  std::optional<double> size;   // grouped_gemm: rows per expert
  double value = 0;      // 0 < value <= 1
  std::string source;
  std::string op = {};   // "gdn_pre": Work::op of src/model/provider.h; empty: any
};

// What `family` and `op` may be; a test holds them to the names of src/model.
const std::vector<std::string>& efficiency_families();
const std::vector<std::string>& efficiency_ops();

struct CollectiveRow {
  std::string kind;      // all_reduce | all_gather | reduce_scatter | all_to_all | p2p
  std::string link = "scale_up"; // scale_up | network
  double share = 0;      // of the link's rate
  Seconds latency = 0;
  std::string source;
  std::string provider = {}; // whose exchanges, as of efficiencies; empty: anyone's, NCCL's own
};

struct ReserveRow {      // memory outside the tensors
  std::string name;      // context, communicators, workspaces, ...
  // process | communicator (one that runs ring collectives) | peer (of a communicator that sends and receives
  // pairwise, in the same scale-up domain) | network (once for such a communicator that leaves the domain) |
  // allocator (once, through PyTorch's allocator: stack megatron counts it as allocated)
  std::string per = "process";
  Bytes bytes = 0;       // of one channel, where there are `channels`
  std::string source;
  std::int64_t channels = 1;
  std::string provider = {}; // whose process, as of efficiencies: in place of anyone's row of the same name; empty: anyone's
};

struct Hardware {
  std::string name, device_name; // profile name; what CUDA calls the device
  std::vector<std::string> aliases = {};
  std::string sm;                // "90"
  Bytes memory = 0;              // total reported by CUDA
  FlopsPerSecond bf16 = 0, fp8 = 0, fp4 = 0;   // dense
  double fp8_relative = 0;       // share of its peak that an fp8 GEMM reaches over that of the same one in bf16; 0: unknown
  BytesPerSecond host_memory = 0; // of the host, a GPU; 0: unknown
  BytesPerSecond bandwidth = 0, achieved_bandwidth = 0;
  BytesPerSecond scale_up = 0;   // per direction, NVLink
  std::int64_t scale_up_domain = 8;
  BytesPerSecond network = 0, host_link = 0;
  Seconds launch_latency = 0;    // floor of one kernel
  std::vector<EfficiencyRow> efficiencies = {};
  std::vector<CollectiveRow> collectives = {};
  std::vector<ReserveRow> reserve = {};
  double allocator_reserve = 0.04; // share of allocated, a named assumption unless simulated
  std::vector<std::string> sources = {}; // "memory: ...", one line per figure

  std::vector<ReserveRow> reserve_of(std::string_view whose) const; // the rows of `reserve` that hold for a provider
};

} // namespace gdn::config
