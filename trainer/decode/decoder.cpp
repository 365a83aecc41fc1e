#include "trainer/decode/decoder.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"

namespace gdn::trainer {

namespace {

// The first `cols` columns of a device matrix, as floats.
std::vector<float> to_floats(Device& device, const View& v, std::int64_t cols) {
  const Bytes size = size_of(v.dtype);
  std::vector<float> out(as_size(v.rows * cols));
  std::vector<std::byte> rows(as_size(((v.rows - 1) * v.stride + v.cols) * size));
  device.to_host(rows.data(), v.data, static_cast<Bytes>(rows.size()));
  for (std::int64_t r = 0; r < v.rows; ++r) {
    for (std::int64_t c = 0; c < cols; ++c) {
      const std::byte* from = rows.data() + (r * v.stride + c) * size;
      float& to = out[as_size(r * cols + c)];
      if (v.dtype == DType::FP64) {
        double wide = 0;
        std::memcpy(&wide, from, 8);
        to = static_cast<float>(wide);
      } else {
        std::memcpy(reinterpret_cast<std::byte*>(&to) + 4 - size, from, as_size(size)); // bf16 is the upper half of an fp32
      }
    }
  }
  return out;
}

} // namespace

Decoder::Decoder(const config::Model& model, const config::Run& run, Device& device, Parameters& parameters, std::int64_t slots, std::int64_t capacity)
    : model_(model), device_(device), forward_(model, run, device, parameters), recorded_(model, run, device, parameters),
      pool_(model, run, device, slots, capacity), replays_(device.records()) {}

void Decoder::check(std::span<const NewTokens> requests) const {
  auto fail = [](std::string message) { throw Error(ErrorCode::Config, "decoding: " + message); };
  size_t tokens = 0;
  std::vector<char> named(as_size(pool_.slots()), 0);
  for (const NewTokens& r : requests) {
    if (r.slot < 0 || r.slot >= pool_.slots()) fail(fmt::format("slot {}; slots are 0 to {}", r.slot, pool_.slots() - 1));
    if (std::exchange(named[as_size(r.slot)], 1)) fail(fmt::format("slot {} is named twice in one pass", r.slot));
    if (pool_.length(r.slot) + static_cast<std::int64_t>(r.ids.size()) > pool_.capacity())
      fail(fmt::format("the request in slot {} has {} tokens and {} more come; a slot holds {}", r.slot, pool_.length(r.slot), r.ids.size(), pool_.capacity()));
    for (std::int64_t id : r.ids)
      if (id < 0 || id >= model_.vocab) fail(fmt::format("slot {}: token id {}; ids are 0 to {}", r.slot, id, model_.vocab - 1));
    tokens += r.ids.size();
  }
  if (tokens == 0) fail("no request has a token");
}

std::vector<float> Decoder::append(std::span<const NewTokens> requests) {
  draft_.reset();
  return pass(requests, nullptr);
}

std::vector<float> Decoder::append_draft(std::span<const NewTokens> requests) {
  draft_.emplace();
  return pass(requests, &*draft_);
}

std::vector<float> Decoder::pass(std::span<const NewTokens> requests, Draft* draft) {
  check(requests);
  std::vector<std::int64_t> ids, offsets{0}, slots, positions;
  for (const NewTokens& r : requests) {
    ids.insert(ids.end(), r.ids.begin(), r.ids.end());
    offsets.push_back(static_cast<std::int64_t>(ids.size()));
    slots.push_back(r.slot);
    positions.push_back(pool_.length(r.slot));
  }
  if (draft) {
    draft->requests.assign(requests.begin(), requests.end());
    draft->offsets = offsets;
    draft->positions = positions;
    reserve(*draft, static_cast<std::int64_t>(ids.size()));
  }
  SequenceStates states;
  const auto of_layer = [&](std::int64_t layer) {
    states = pool_.layer(layer);
    states.slots = slots;
    states.positions = positions;
    if (draft) {
      states.token_conv = draft->layers[as_size(layer)].token_conv;
      states.token_recurrent = draft->layers[as_size(layer)].token_recurrent;
    }
    return &states;
  };
  MicroBatch batch;
  batch.ids = ids;
  batch.sequences = offsets;
  const bool single = std::all_of(requests.begin(), requests.end(), [](const NewTokens& r) { return r.ids.size() == 1; });
  const View logits = single && !draft && replays_ ? replayed(batch, of_layer) : forward_.logits(batch, of_layer);
  for (const NewTokens& r : requests) pool_.set_length(r.slot, pool_.length(r.slot) + static_cast<std::int64_t>(r.ids.size()));
  return to_floats(device_, logits, model_.vocab);
}

View Decoder::replayed(const MicroBatch& given, const ForwardPass::StatesOf& states_of) {
  MicroBatch batch = given;
  batch.states = states_of(0); // slots and positions are those of every layer
  const StepContext context{.micro_batches = {&batch, 1}};
  const auto requests = static_cast<std::int64_t>(batch.ids.size());
  if (const auto found = steps_.find(requests); found != steps_.end()) {
    found->second.recording->replay(context);
    return found->second.logits;
  }
  recorded_.reserve(pool_.slots(), pool_.slots()); // no pass has more, so none should move the tensors of the others
  if (recorded_.reserve(requests, requests)) steps_.clear();
  Step step;
  step.recording = device_.record(context, [&] { step.logits = recorded_.run(batch, states_of); });
  return steps_.emplace(requests, std::move(step)).first->second.logits;
}

void Decoder::reserve(Draft& draft, std::int64_t tokens) {
  Bytes total = 0;
  for (std::int64_t layer = 0; layer < model_.layers(); ++layer) {
    SequenceStates& s = draft.layers.emplace_back(pool_.layer(layer));
    for (auto [pool, after] : {std::pair{&s.conv, &s.token_conv}, std::pair{&s.recurrent, &s.token_recurrent}}) {
      if (!*pool) continue;
      *after = *pool;
      after->rows = pool->rows / pool_.slots() * tokens;
      after->data = nullptr;
      total += round_up(after->rows * after->cols * size_of(after->dtype), kTensorAlignment);
    }
  }
  draft.memory = DeviceMemory(device_, std::max<Bytes>(total, 1), "the states after every token of a draft");
  std::byte* next = draft.memory.data();
  for (SequenceStates& s : draft.layers)
    for (View* v : {&s.token_conv, &s.token_recurrent})
      if (v->rows > 0) {
        v->data = next;
        next += round_up(v->rows * v->cols * size_of(v->dtype), kTensorAlignment);
      }
}

void Decoder::rewind(std::int64_t slot, std::int64_t accepted) {
  const auto fail = [&](const std::string& what) { throw Error(ErrorCode::Config, fmt::format("decoding: rewind of slot {}: {}", slot, what)); };
  if (!draft_) fail("the last pass was no draft");
  const auto& requests = draft_->requests;
  const auto r = std::find_if(requests.begin(), requests.end(), [&](const NewTokens& n) { return n.slot == slot; });
  if (r == requests.end()) fail("it had no tokens in the draft");
  const auto index = static_cast<size_t>(r - requests.begin());
  if (accepted < 1 || accepted > static_cast<std::int64_t>(r->ids.size()))
    fail(fmt::format("{} accepted of {} tokens; at least the first is", accepted, r->ids.size()));
  const std::int64_t token = draft_->offsets[index] + accepted - 1;
  std::vector<std::byte> staging;
  for (const SequenceStates& s : draft_->layers)
    for (auto [pool, after] : {std::pair{s.conv, s.token_conv}, std::pair{s.recurrent, s.token_recurrent}}) {
      if (!after) continue;
      const Bytes one = pool.rows / pool_.slots() * pool.cols * size_of(pool.dtype);
      staging.resize(as_size(one));
      device_.to_host(staging.data(), after.data + token * one, one);
      device_.to_device(pool.data + slot * one, staging.data(), one);
    }
  pool_.set_length(slot, draft_->positions[index] + accepted);
}

} // namespace gdn::trainer
