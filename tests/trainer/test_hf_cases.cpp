#include <doctest/doctest.h>

#include "config/profiles.h"
#include "tests/trainer/hf_cases.h"
#include "tests/temporary_folder.h"
#include "trainer/hf/checkpoint.h"
#include "trainer/hf/export.h"

// Checkpoints that transformers wrote, in the folder that GDN_HF_CASES names (meson option hf_cases).
using namespace gdn;
using namespace gdn::trainer;

TEST_CASE("hf: a checkpoint of transformers survives loading and exporting byte for byte") {
  for (const char* name : {"next-moe", "qwen35-dense"}) {
    CAPTURE(name);
    const std::filesystem::path in = test::hf_cases() / name;
    const config::Model model = config::Profiles().model(in.string()).model;
    const model::ParameterTable table = model::parameter_table(model);
    const hf::Checkpoint checkpoint(in, model, table);
    CHECK(checkpoint.not_read().empty());

    test::TemporaryFolder folder;
    hf::Export out(folder / "out", checkpoint);
    for (const model::Parameter& p : table.parameters) out.put(p, checkpoint.read(p));
    out.commit();
    for (const char* file : {"model.safetensors", "config.json"})
      CHECK(test::read_bytes(folder / "out" / file) == test::read_bytes(in / file));

    // Nothing to follow but the model: the same tensors in the same order, bytes included.
    hf::Export fresh(folder / "fresh", model, table, {.model_type = hf::model_type_of(in), .dtype = DType::FP32});
    for (const model::Parameter& p : table.parameters) fresh.put(p, checkpoint.read(p));
    fresh.commit();
    CHECK(test::read_bytes(folder / "fresh" / "model.safetensors") == test::read_bytes(in / "model.safetensors"));
  }
}
