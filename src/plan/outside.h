#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "config/hardware.h"
#include "config/model.h"
#include "config/run.h"
#include "model/op.h"
#include "model/provider.h"
#include "model/stages.h"
#include "program/schedule.h"

// Memory of a rank that PyTorch's allocator does not hand out as tensors of a step: the CUDA context, NCCL's
// buffers, CUDA graphs. One row an item, each with its source.
namespace gdn::plan {

struct OutsideRow {
  std::string name, source;
  Bytes bytes = 0;
};

// A group whose ranks exchange data in a training step. NCCL keeps buffers a channel for each.
struct Communicator {
  std::string name;
  std::int64_t ranks = 1;
  bool ring = true;       // runs collectives: every channel is connected to two neighbours
  std::int64_t peers = 0; // ranks that it sends to or receives from pairwise
  model::Group group = model::Group::Tp; // where those lie
};

// The groups of more than one rank that the layout creates (Megatron-LM main d98e8a64, parallel_state), those
// of the busiest pipeline rank: tensor, context, data, expert, expert tensor, expert data and pipeline
// parallel, the pair that shares tied embeddings, and all ranks (gradient norm, barriers).
std::vector<Communicator> communicators(const config::Model& model, const config::Run& run);

// Context, communicators and whatever else the hardware profile itemises for processes of `provider`, but for
// `per: allocator` under stack megatron, which is counted as allocated.
std::vector<OutsideRow> outside_rows(const config::Model& model, const config::Run& run, const config::Hardware& hardware, std::string_view provider);

// What a rank captures: its decoder layers by chunk and its schedule.
struct CapturedRank {
  std::vector<std::vector<const model::OpList*>> chunks;
  std::vector<program::Slot> slots; // of a whole step
};

// CUDA graphs of one rank, as cuda_graph_impl and cuda_graph_scope say; empty without them.
//  - transformer_engine: a forward and a backward graph for each layer in the scope, and each micro-batch of the
//    step where PP > 1 (one where it is 1); local: for each micro-batch in flight. A graph reads a static input
//    and a static output gradient, in the size of the residual stream, reused once its backward has run
//    (Megatron-LM, cuda_graphs.py, TECudaGraphHelper; TE make_graphed_callables).
//  - full_iteration: all passes of a step in one graph, whose inputs are the token ids.
// A launch recorded in a graph costs device memory of the driver's.
std::vector<OutsideRow> graph_rows(const CapturedRank& rank, const config::Run& run, const model::Provider& provider);

} // namespace gdn::plan
