#pragma once
#include <functional>

#include <fmt/core.h>

#include "config/profiles.h"
#include "tests/trainer/hf_folder.h"
#include "trainer/cpu/device.h"
#include "trainer/hf/checkpoint.h"
#include "trainer/hf/parity.h"
#include "trainer/hf/weights.h"

// Reference results for the tiny checkpoints of hf_folder.h, for tests of the comparison itself.
namespace gdn::test {

inline constexpr std::int64_t kBatch = 2, kSeq = 9;

inline config::ModelProfile profile_of(const std::filesystem::path& folder, const char* stack) {
  config::ModelProfile p = config::Profiles().model(folder.string());
  p.run.stack = stack;
  p.run.dtype = DType::FP32;
  return p;
}

// reference.safetensors of the native stack's results; `spoil` may change one tensor before it is written.
using Spoil = std::function<void(const std::string& name, std::vector<float>& values)>;
inline void write_reference(const std::filesystem::path& folder, const Spoil& spoil = {}) {
  const config::ModelProfile p = profile_of(folder, "native");
  std::vector<std::int64_t> ids, labels;
  for (std::int64_t i = 0; i < kBatch * kSeq; ++i) {
    ids.push_back(i * 5 % HfFolder::kVocab);
    labels.push_back(i == 3 ? -100 : i * 7 % HfFolder::kVocab);
  }
  std::vector<std::pair<trainer::TensorInfo, std::vector<float>>> results;
  std::vector<trainer::TensorInfo> infos{{"input_ids", DType::Int64, {kBatch, kSeq}}, {"labels", DType::Int64, {kBatch, kSeq}}};
  auto write = [&] {
    trainer::SafetensorsWriter writer(folder / trainer::hf::kReferenceFile, infos);
    writer.write(0, 0, std::as_bytes(std::span(ids)));
    writer.write(1, 0, std::as_bytes(std::span(labels)));
    for (size_t i = 0; i < results.size(); ++i) writer.write(i + 2, 0, std::as_bytes(std::span(results[i].second)));
    writer.commit();
  };
  write(); // inputs alone, for the shape of the run

  const config::Model model = trainer::hf::parity_model(p.model);
  trainer::CpuDevice device;
  trainer::Session session(model, trainer::hf::parity_run(p.run, trainer::hf::Reference(folder)), device);
  const trainer::hf::Checkpoint checkpoint(folder, model, session.parameters().table());
  trainer::hf::load(checkpoint, session.parameters());
  session.use({});
  const trainer::Trace trace = run_traced(session, {ids, labels, trainer::dense_sequences(kBatch, kSeq)});
  auto add = [&](std::string name, std::vector<std::int64_t> shape, std::vector<float> values) {
    if (spoil) spoil(name, values);
    infos.push_back({name, DType::FP32, std::move(shape)});
    results.emplace_back(infos.back(), std::move(values));
  };
  for (int i = 0; i < HfFolder::kLayers; ++i)
    add(fmt::format("hidden.{}", i), {kBatch, kSeq, HfFolder::kHidden}, trace.hidden.at(static_cast<size_t>(i)));
  add(fmt::format("hidden.{}", HfFolder::kLayers), {kBatch, kSeq, HfFolder::kHidden}, trace.normed);
  add("logits", {kBatch, kSeq, HfFolder::kVocab}, trace.logits);
  add("loss", {1}, {static_cast<float>(trace.result.loss)});
  for (const trainer::hf::MappedTensor& t : checkpoint.tensors()) {
    std::vector<float> values;
    for (const trainer::hf::Piece& piece : t.pieces) {
      const std::vector<float> g = session.parameters().gradient(piece.parameter->name);
      values.insert(values.end(), g.begin() + piece.first, g.begin() + piece.first + piece.count);
    }
    add("grad." + t.name, t.shape, std::move(values));
  }
  write();
}

} // namespace gdn::test
