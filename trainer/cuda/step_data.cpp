#include "trainer/cuda/step_data.h"

#include <algorithm>

#include <cuda_runtime_api.h>

#include "kernels/common/check.h"
#include "kernels/common/memory.h"
#include "kernels/gdn/chunk_table.h"
#include "trainer/comm/ranks.h"
#include "trainer/decode/states.h"

namespace gdn::trainer::cuda {

Buffer::~Buffer() { GDN_CUDA_NOTHROW(cudaFree(data_)); }

void Buffer::reserve(Bytes bytes) {
  if (bytes <= bytes_) return;
  GDN_CUDA(cudaFree(std::exchange(data_, nullptr)));
  bytes_ = 0;
  data_ = kernels::allocate(bytes, "the ids and tables of a step");
  bytes_ = bytes;
}

StepData::~StepData() {
  if (copied_) GDN_CUDA_NOTHROW(cudaEventDestroy(copied_));
  GDN_CUDA_NOTHROW(cudaFreeHost(host_));
}

std::byte* StepData::stage(Bytes bytes) {
  if (copied_) GDN_CUDA(cudaEventSynchronize(copied_)); // the copy before has read it
  else GDN_CUDA(cudaEventCreateWithFlags(&copied_, cudaEventDisableTiming));
  if (bytes > host_bytes_) {
    GDN_CUDA(cudaFreeHost(std::exchange(host_, nullptr)));
    host_bytes_ = 0;
    GDN_CUDA(cudaMallocHost(reinterpret_cast<void**>(&host_), static_cast<size_t>(bytes)));
    host_bytes_ = bytes;
  }
  return host_;
}

namespace {

// Where the data of a micro-batch lies in the buffer.
struct Offsets {
  Bytes ids, labels, positions, sequences, local, local_positions, cu_tokens, slots, token_slots, table;
  std::int64_t tokens, sequence_count, local_count;
  Offsets(const MicroBatch& b, Parts& parts)
      : tokens(static_cast<std::int64_t>(b.ids.size())), sequence_count(static_cast<std::int64_t>(b.sequences.size()) - 1),
        local_count(b.shards ? static_cast<std::int64_t>(b.shards->positions.size()) : tokens) {
    ids = parts.add(tokens * 8);
    labels = parts.add(tokens * 8);
    positions = parts.add(tokens * 4);
    sequences = parts.add((sequence_count + 1) * 8);
    local = parts.add(b.shards ? local_count * 4 : 0);
    local_positions = parts.add(b.shards || b.states ? local_count * 4 : 0);
    cu_tokens = parts.add(b.states ? (sequence_count + 1) * 4 : 0);
    slots = parts.add(b.states ? sequence_count * 4 : 0);
    token_slots = parts.add(b.states ? tokens * 4 : 0);
  }
};

void write(const MicroBatch& b, const Offsets& at, std::int64_t cp_rank, std::byte* host) {
  for (auto [from, to] : {std::pair{b.ids, at.ids}, {b.labels, at.labels}, {b.sequences, at.sequences}}) // decoding has no labels
    std::copy(from.begin(), from.end(), reinterpret_cast<std::int64_t*>(host + to));
  auto numbers = [&](Bytes offset) { return reinterpret_cast<std::int32_t*>(host + offset); };
  for (size_t q = 0; q + 1 < b.sequences.size(); ++q)
    for (std::int64_t t = b.sequences[q]; t < b.sequences[q + 1]; ++t) {
      const auto inside = static_cast<std::int32_t>(t - b.sequences[q]);
      numbers(at.positions)[t] = inside;
      if (!b.states) continue;
      numbers(at.local_positions)[t] = static_cast<std::int32_t>(b.states->positions[q]) + inside;
      numbers(at.token_slots)[t] = static_cast<std::int32_t>(b.states->slots[q]);
    }
  if (b.states) {
    std::copy(b.sequences.begin(), b.sequences.end(), numbers(at.cu_tokens));
    std::copy(b.states->slots.begin(), b.states->slots.end(), numbers(at.slots));
  }
  if (!b.shards) return;
  const std::vector<std::int64_t>& mine = b.shards->tokens[static_cast<size_t>(cp_rank)];
  std::copy(mine.begin(), mine.end(), numbers(at.local));
  std::copy(b.shards->positions.begin(), b.shards->positions.end(), numbers(at.local_positions));
}

} // namespace

void StepData::bring(const StepContext& context, const Engine& engine) {
  Parts parts;
  std::vector<Offsets> at;
  for (const MicroBatch& b : context.micro_batches) at.emplace_back(b, parts);
  const Bytes copied = parts.end();
  for (Offsets& o : at) o.table = parts.add(kernels::gdn_chunk_table_bytes(o.tokens, o.sequence_count));
  device_.reserve(parts.end());

  std::byte* const host = stage(copied);
  for (size_t i = 0; i < at.size(); ++i) write(context.micro_batches[i], at[i], context.ranks ? context.ranks->place().cp : 0, host);
  GDN_CUDA(cudaMemcpyAsync(device_.data(), host, static_cast<size_t>(copied), cudaMemcpyHostToDevice, engine.stream));
  GDN_CUDA(cudaEventRecord(copied_, engine.stream));

  batches_.clear();
  for (size_t i = 0; i < at.size(); ++i) {
    const MicroBatch& b = context.micro_batches[i];
    const Offsets& o = at[i];
    auto numbers = [&](Bytes offset) { return reinterpret_cast<const std::int32_t*>(device_.data() + offset); };
    DeviceBatch d;
    d.tokens = o.tokens;
    d.sequences = o.sequence_count;
    d.ids = reinterpret_cast<const std::int64_t*>(device_.data() + o.ids);
    d.labels = reinterpret_cast<const std::int64_t*>(device_.data() + o.labels);
    d.positions = numbers(o.positions);
    d.local = o.local_count;
    d.local_tokens = b.shards ? numbers(o.local) : nullptr;
    d.local_positions = b.shards || b.states ? numbers(o.local_positions) : d.positions;
    if (b.states) {
      d.cu_tokens = numbers(o.cu_tokens);
      d.slots = numbers(o.slots);
      d.token_slots = numbers(o.token_slots);
    }
    d.table = kernels::gdn_chunk_table_at(device_.data() + o.table, d.tokens, d.sequences);
    kernels::gdn_chunk_table({device_.data() + o.sequences, true, d.tokens, d.sequences, d.table}, engine.launch());
    batches_.push_back(d);
  }
}

} // namespace gdn::trainer::cuda
