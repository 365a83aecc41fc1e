#include <doctest/doctest.h>

#include "config/profiles.h"

using namespace gdn;

TEST_CASE("built-in profiles are found under the names and aliases that their files give") {
  const config::Profiles profiles;
  CHECK(profiles.models().size() >= 20);
  CHECK(profiles.hardwares().size() >= 13);
  for (const auto& l : profiles.models()) {
    const config::Model m = profiles.model(l.name).model;
    CHECK(m.name == l.name);
    CHECK(m.aliases == l.aliases);
  }
  for (const auto& l : profiles.hardwares()) CHECK(profiles.hardware(l.name).name == l.name);
  CHECK(profiles.model("qwen3.6-35b-a3b").model.name == "qwen3.5-35b-a3b");
}
