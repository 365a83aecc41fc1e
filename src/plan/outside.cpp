#include "plan/outside.h"

#include <algorithm>
#include <map>

#include <fmt/core.h>

#include "cost/cost.h"
#include "plan/halves.h"

namespace gdn::plan {

using model::Group;

std::vector<Communicator> communicators(const config::Model& model, const config::Run& run) {
  const config::Parallel& p = run.parallel;
  const bool moe = model.moe.experts > 0;
  auto has = [&](auto kind) { return std::find(model.mixers.begin(), model.mixers.end(), kind) != model.mixers.end(); };
  std::vector<Communicator> out;
  auto add = [&](const char* name, std::int64_t ranks, bool ring, std::int64_t peers = 0, Group group = Group::Tp) {
    if (ranks > 1) out.push_back({name, ranks, ring, peers, group});
  };
  add("all ranks", p.gpus, true);
  add("tensor parallel", p.tp, true);
  // Heads are exchanged around the rule, and around attention under a2a; p2p passes keys to a neighbour.
  const bool attention = has(config::LayerKind::Attention), rule = has(config::LayerKind::Gdn) || has(config::LayerKind::Gdn2);
  const std::int64_t exchanged = rule || (attention && run.cp_comm_type == "a2a") ? p.cp - 1 : attention && run.cp_comm_type == "p2p" ? 2 : 0;
  add("context parallel", p.cp, attention && run.cp_comm_type == "all_gather", std::min(exchanged, p.cp - 1), Group::Cp);
  add("data parallel", p.dp() * p.cp, true);
  if (moe) {
    add("expert parallel", p.ep, run.moe_token_dispatcher == "allgather", run.moe_token_dispatcher == "alltoall" ? p.ep - 1 : 0, Group::Ep);
    add("expert tensor and expert parallel", p.ep * p.etp, true);
    add("expert data parallel", p.edp(), true);
  }
  add("pipeline parallel", p.pp, false, std::min<std::int64_t>(2, p.pp - 1), Group::Pp);
  if (model.tied_embeddings && p.pp > 1) add("tied embeddings", 2, true);
  return out;
}

std::vector<OutsideRow> outside_rows(const config::Model& model, const config::Run& run, const config::Hardware& hardware, std::string_view provider) {
  std::vector<OutsideRow> out;
  const std::vector<Communicator> groups = communicators(model, run);
  for (const config::ReserveRow& row : hardware.reserve_of(provider)) {
    if (row.per == "process" || (row.per == "allocator" && run.stack != "megatron" && provider == "upstream")) out.push_back({row.name, row.source, row.bytes});
    if (row.per == "allocator" || row.per == "process") continue;
    for (const Communicator& c : groups) {
      auto add = [&](std::string what, Bytes bytes) { out.push_back({fmt::format("NCCL, {} ({} ranks): {}", c.name, c.ranks, what), row.source, bytes}); };
      if (row.per == "communicator" && c.ring) add(fmt::format("{} channels", row.channels), row.channels * row.bytes);
      const std::int64_t neighbours = cost::neighbours(run.parallel, hardware, c.group, c.ranks);
      const std::int64_t near = std::min({c.peers, neighbours - 1, std::int64_t{7}});
      if (row.per == "peer" && near > 0) add(fmt::format("{} channels x {} peer{}", row.channels, near, near == 1 ? "" : "s"), near * row.channels * row.bytes);
      if (row.per == "network" && c.peers > 0 && c.ranks > neighbours) add("shared by peers of other nodes", row.bytes);
    }
  }
  return out;
}

namespace {

// Device memory of one recorded launch.
constexpr Bytes kGraphLaunch = 2700;
constexpr const char* kGraphLaunchSource = "JBjoernskov/Twin4Build#134: 2.0 GiB for 0.8 million nodes, 2.7 KB each; 64 KB before CUDA 12.4 and driver 550 "
                                           "(PyTorch documentation, CUDAGraph Trees)";

bool in_scope(const config::Run& run, std::initializer_list<std::string_view> names) {
  return run.cuda_graph_scope.empty() || std::any_of(names.begin(), names.end(), [&](std::string_view n) {
    return std::find(run.cuda_graph_scope.begin(), run.cuda_graph_scope.end(), n) != run.cuda_graph_scope.end();
  });
}

std::int64_t launches(const model::OpList& list, size_t ops, const model::Provider& provider) {
  std::int64_t n = 0;
  for (size_t i = 0; i < ops; ++i)
    for (int step = -1; step < static_cast<int>(list.ops[i].steps.size()); ++step) n += provider.work(list, list.ops[i], step).kernels;
  return n;
}

// Launches of the captured part of a layer, forward and backward; 0: not captured.
std::int64_t captured_launches(const model::OpList& list, const config::Run& run, const model::Provider& provider) {
  const std::vector<model::OpList> parts = halves(list);
  if (run.cuda_graph_scope.empty() || parts.size() != 2) return launches(list, list.ops.size(), provider);
  std::int64_t n = in_scope(run, {"attn"}) ? launches(parts[0], parts[0].ops.size(), provider) : 0;
  const model::OpList& mlp = parts[1];
  const auto router = std::find_if(mlp.ops.begin(), mlp.ops.end(), [](const model::Op& op) { return op.kind == model::OpKind::Router || op.kind == model::OpKind::TopK; });
  const bool moe = router != mlp.ops.end();
  if (in_scope(run, {moe ? "moe" : "mlp"})) n += launches(mlp, mlp.ops.size(), provider);
  else if (moe && in_scope(run, {"moe_router", "moe_preprocess"})) n += launches(mlp, static_cast<size_t>(router - mlp.ops.begin()) + 1, provider);
  return n;
}

} // namespace

std::vector<OutsideRow> graph_rows(const CapturedRank& rank, const config::Run& run, const model::Provider& provider) {
  if (run.cuda_graph_impl == "none") return {};
  const bool whole = run.cuda_graph_impl == "full_iteration" || (!run.cuda_graph_scope.empty() && in_scope(run, {"full_iteration"}));
  config::Run scope = run;
  if (whole) scope.cuda_graph_scope.clear();
  std::map<const model::OpList*, std::int64_t> known;
  std::vector<std::int64_t> layers, nodes; // captured layers and their launches, per chunk
  Bytes stream = 0;
  for (const auto& chunk : rank.chunks) {
    layers.push_back(0);
    nodes.push_back(0);
    for (const model::OpList* list : chunk) {
      auto [it, fresh] = known.try_emplace(list, 0);
      if (fresh) it->second = captured_launches(*list, scope, provider);
      layers.back() += it->second > 0;
      nodes.back() += it->second;
      if (list->input >= 0) stream = std::max(stream, list->tensor(list->input).bytes());
    }
  }
  std::int64_t micro_batches = 0, now = 0, in_flight = 0, recorded = 0;
  for (const program::Slot& s : rank.slots) {
    micro_batches = std::max<std::int64_t>(micro_batches, s.micro_batch + 1);
    now += (s.pass == program::Pass::Forward ? 1 : -1) * layers[static_cast<size_t>(s.chunk)];
    in_flight = std::max(in_flight, now);
  }
  std::int64_t in_one = 0;
  for (std::int64_t n : layers) in_one += n;
  for (std::int64_t n : nodes) recorded += n;
  if (recorded == 0) return {};
  const std::int64_t sets = whole || (run.parallel.pp > 1 && run.cuda_graph_impl == "transformer_engine") ? micro_batches
                            : run.parallel.pp > 1 ? (in_flight + in_one - 1) / in_one : 1;
  std::vector<OutsideRow> out;
  if (!whole)
    out.push_back({fmt::format("CUDA graphs, {} static inputs and output gradients", in_flight),
                   "Megatron-LM, cuda_graphs.py: one of each for a layer and micro-batch in flight; Transformer Engine, make_graphed_callables",
                   2 * in_flight * stream});
  out.push_back({fmt::format("CUDA graphs, {} recorded launches", recorded * sets), kGraphLaunchSource, recorded * sets * kGraphLaunch});
  return out;
}

} // namespace gdn::plan
