#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "tests/trainer/mutate.h"

// The mutation test of test_safetensors.cpp for as long as one likes: fuzz_safetensors [SECONDS [SEED]].
// Meant for a build with -Db_sanitize=address,undefined. Damage accumulates over accepted files.
int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 10;
  std::mt19937_64 random(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1);
  const std::string json = R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
                           R"("b":{"dtype":"BF16","shape":[],"data_offsets":[24,26]}}      )";
  std::string seed(8, '\0');
  seed[0] = static_cast<char>(json.size());
  seed += json + std::string(26, 'x');
  std::string current = seed;
  long tried = 0, accepted = 0;
  const auto start = std::chrono::steady_clock::now();
  while (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() < seconds) {
    std::string next = gdn::test::mutate(current, random);
    ++tried;
    if (gdn::test::survives(next)) {
      ++accepted;
      current = next.size() < 4096 ? next : seed;
    } else if (tried % 64 == 0) {
      current = seed;
    }
  }
  std::printf("%ld files, %ld accepted, no failure\n", tried, accepted);
}
