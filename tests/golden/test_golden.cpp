#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "command.h"

using namespace gdn::test;
namespace fs = std::filesystem;

// Every example's plan and estimate as text, against the stored one. After a wanted change:
// GDN_UPDATE_GOLDEN=1 meson test -C build golden, then review the difference.
namespace {

std::string read(const fs::path& path) {
  std::ifstream in(path);
  return {std::istreambuf_iterator<char>(in), {}};
}

void compare(const fs::path& stored, const std::string& now) {
  CAPTURE(stored.filename().string());
  if (std::getenv("GDN_UPDATE_GOLDEN")) std::ofstream(stored) << now;
  CHECK(fs::exists(stored));
  CHECK(read(stored) == now);
}

} // namespace

TEST_CASE("every example plans and estimates as stored") {
  const fs::path root = source_root(), stored = root / "tests/golden";
  int examples = 0;
  for (const auto& entry : fs::directory_iterator(root / "examples")) {
    if (entry.path().extension() != ".yaml") continue;
    ++examples;
    const std::string name = entry.path().stem().string(), file = entry.path().string();
    CAPTURE(name);
    const int expected = name == "qwen3-next-80b-16xh100" ? 3 : 0;
    Result plan = run({gdnplan(), "plan", file});
    CHECK(plan.status == expected);
    CHECK(plan.err == "");
    compare(stored / (name + ".plan.txt"), plan.out);
    Result estimate = run({gdnplan(), "estimate", file, "--ranks"});
    CHECK((estimate.status == 0 || estimate.status == 3));
    CHECK(estimate.err == "");
    compare(stored / (name + ".estimate.txt"), estimate.out);
  }
  CHECK(examples >= 7);
}
