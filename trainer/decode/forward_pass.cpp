#include "trainer/decode/forward_pass.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "model/stack_lists.h"
#include "trainer/decode/states.h"

namespace gdn::trainer {

using model::Op;
using model::OpList;
using model::TensorId;

namespace {

config::Run run_of_rows(config::Run run, std::int64_t rows) {
  run.micro_batch = run.global_batch = 1;
  run.seq = rows;
  run.train_mtp = false;
  run.cross_entropy = config::CrossEntropy::FusedNative; // the one form whose logits exist in every stack
  return run;
}

void refuse(const std::string& what) { throw Error(ErrorCode::Config, "decoding: " + what); }

} // namespace

ForwardPass::ForwardPass(const config::Model& model, const config::Run& run, Device& device, Parameters& parameters)
    : model_(model), run_(run_of_rows(run, 1)), device_(device), parameters_(parameters) {
  const config::Parallel& p = run.parallel;
  if (p.tp * p.cp * p.pp * p.ep * p.etp != 1 || p.gpus != 1) refuse("it runs on one rank");
  if (run.moe_capacity_factor) refuse("moe_expert_capacity_factor drops rows by what else is in the batch; decode without it");
  if (run.moe_router_force_load_balancing) refuse("moe_router_force_load_balancing routes by row number; decode without it");
  vocabulary_ = model::padded_vocabulary(model, run);
}

// Ops that the result depends on, and a place in the workspace for every storage they touch.
ForwardPass::Unit ForwardPass::lay_out(OpList list, TensorId result) const {
  Unit u;
  u.result = result;
  u.needed.assign(list.ops.size(), 0);
  u.place.assign(list.storages.size(), -1);
  std::vector<char> wanted(list.storages.size(), 0);
  auto storage = [&](TensorId t) { return as_size(list.tensor(t).storage); };
  wanted[storage(result)] = 1;
  for (size_t i = list.ops.size(); i-- > 0;) {
    const Op& op = list.ops[i];
    const auto makes = [&](TensorId t) { return wanted[storage(t)] != 0; };
    // An op after the result that only shares a storage with it (a loss written over the logits) is none.
    if (static_cast<int>(i) > list.producer(result) || std::none_of(op.outputs.begin(), op.outputs.end(), makes)) continue;
    u.needed[i] = 1;
    for (TensorId t : op.inputs) wanted[storage(t)] = 1;
  }
  auto place = [&](TensorId t) {
    if (u.place[storage(t)] >= 0 || (list.input >= 0 && storage(t) == storage(list.input))) return;
    u.place[storage(t)] = u.bytes;
    u.bytes += round_up(list.storage_of(t).bytes, kTensorAlignment);
  };
  Bytes scratch = 0;
  for (size_t i = 0; i < list.ops.size(); ++i)
    if (u.needed[i]) {
      for (TensorId t : list.ops[i].outputs) place(t);
      device_.check_runs(list.ops[i]);
      scratch = std::max(scratch, device_.provider().work(list, list.ops[i], -1).scratch);
    }
  u.scratch_at = u.bytes;
  u.bytes += scratch;
  u.list = std::move(list);
  return u;
}

const ForwardPass::Unit& ForwardPass::layer_unit(std::int64_t layer, std::int64_t rows, std::int64_t sequences) {
  const LayerKey key{model_.mixers[as_size(layer)], model_.mlps[as_size(layer)], rows, sequences};
  const auto found = layers_.find(key);
  if (found != layers_.end()) return found->second;
  OpList list = model::decoder_layer(model_, run_of_rows(run_, rows), std::get<0>(key), std::get<1>(key));
  for (Op& op : list.ops) // as many requests as there are, whatever a run has room for
    if (auto* a = std::get_if<model::GdnAttr>(&op.attr)) a->sequences = sequences;
  const TensorId output = list.output;
  return layers_.emplace(key, lay_out(std::move(list), output)).first->second;
}

const ForwardPass::Unit& ForwardPass::end_unit(End end, std::int64_t rows) {
  const auto found = ends_.find({end, rows});
  if (found != ends_.end()) return found->second;
  const config::Run run = run_of_rows(run_, rows);
  OpList list = end == End::Embedding ? model::embedding_unit(model_, run) : model::head_unit(model_, run);
  TensorId result = list.output;
  if (end == End::Head) {
    const int head = list.find_op("lm_head");
    if (head < 0) throw Error(ErrorCode::Internal, fmt::format("op list '{}' has no lm_head", list.name));
    result = list.ops[as_size(head)].outputs.front();
  }
  return ends_.emplace(std::pair{end, rows}, lay_out(std::move(list), result)).first->second;
}

View ForwardPass::run(const Unit& unit, const std::string& prefix, std::byte* input, const MicroBatch& batch, DeviceMemory& workspace) {
  const OpList& list = unit.list;
  auto operand = [&](TensorId t, program::AccessMode mode) {
    const Bytes place = unit.place[as_size(list.tensor(t).storage)];
    return OpCall::Operand{{-1, t, mode, false}, place < 0 ? input : workspace.data() + place, t, {}};
  };
  const StepContext context{.micro_batches = {&batch, 1}};
  HostTables tables;
  for (size_t i = 0; i < list.ops.size(); ++i) {
    if (!unit.needed[i]) continue;
    const Op& op = list.ops[i];
    std::vector<OpCall::Operand> operands;
    for (TensorId t : op.inputs) operands.push_back(operand(t, program::AccessMode::Read));
    for (TensorId t : op.outputs) operands.push_back(operand(t, program::AccessMode::Write));
    std::vector<OpCall::Parameter> parameters;
    for (const model::ParamRef& ref : op.params) parameters.push_back({parameters_.resolve(prefix, ref).value(), {}});
    program::Event event;
    event.op = static_cast<int>(i);
    event.step = -1;
    event.pass = program::Pass::Forward;
    const std::span<std::byte> scratch(workspace.data() + unit.scratch_at, as_size(unit.bytes - unit.scratch_at));
    OpCall call(list, event, std::move(operands), std::move(parameters), scratch, context, 0, tables);
    device_.run(call);
    call.check_all_used();
    if (static_cast<int>(i) == list.producer(unit.result)) return call.view_of(operand(unit.result, program::AccessMode::Read));
  }
  throw Error(ErrorCode::Internal, fmt::format("op list '{}' never makes '{}'", list.name, list.tensor(unit.result).name));
}

bool ForwardPass::reserve(std::int64_t rows, std::int64_t sequences) {
  Bytes most = std::max(end_unit(End::Embedding, rows).bytes, end_unit(End::Head, rows).bytes);
  for (std::int64_t layer = 0; layer < model_.layers(); ++layer) most = std::max(most, layer_unit(layer, rows, sequences).bytes);
  if (workspaces_[0].bytes() >= most) return false; // they grow together
  for (DeviceMemory& workspace : workspaces_) workspace = DeviceMemory(device_, most, "the tensors of a forward pass");
  return true;
}

View ForwardPass::run(const MicroBatch& given, const StatesOf& states_of) {
  const auto rows = static_cast<std::int64_t>(given.ids.size()), sequences = static_cast<std::int64_t>(given.sequences.size()) - 1;
  MicroBatch batch = given;
  int side = 0;
  auto other_side = [&]() -> DeviceMemory& { return workspaces_[side ^= 1]; };
  batch.states = nullptr;
  View x = run(end_unit(End::Embedding, rows), "", nullptr, batch, other_side());
  for (std::int64_t layer = 0; layer < model_.layers(); ++layer) {
    batch.states = states_of ? states_of(layer) : nullptr;
    x = run(layer_unit(layer, rows, sequences), fmt::format("layers.{}.", layer), x.data, batch, other_side());
  }
  batch.states = nullptr;
  return run(end_unit(End::Head, rows), "", x.data, batch, other_side());
}

View ForwardPass::logits(const MicroBatch& given, const StatesOf& states_of) {
  reserve(static_cast<std::int64_t>(given.ids.size()), static_cast<std::int64_t>(given.sequences.size()) - 1);
  MicroBatch batch = given;
  if (states_of) batch.states = states_of(0); // slots and positions are those of every layer
  device_.begin_step({.micro_batches = {&batch, 1}});
  return run(batch, states_of);
}

} // namespace gdn::trainer
