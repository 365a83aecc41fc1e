#include <doctest/doctest.h>

#include "core/error.h"
#include "core/revision.h"
#include "core/units.h"

using namespace gdn;

TEST_CASE("sizes are powers of 1024 whatever the prefix is called") {
  CHECK(parse_bytes("80GB", "--budget") == 85899345920);
  CHECK(parse_bytes("80GiB", "--budget") == 85899345920);
  CHECK(parse_bytes("80g", "--budget") == 85899345920);
  CHECK(parse_bytes("1.5 MiB", "--budget") == 1572864);
  CHECK(parse_bytes("4096", "--budget") == 4096);
  for (const char* bad : {"", "x", "-1", "1e400", "80 GX", "nan", "99999999999G"})
    CHECK_THROWS_AS(parse_bytes(bad, "--budget"), Error);
}

TEST_CASE("sizes print with their unit") {
  CHECK(format_gib(85899345920) == "80.00 GiB");
  CHECK(format_bytes(676 * kMiB) == "676.0 MiB");
  CHECK(format_count(86592) == "86,592");
  CHECK(format_count(-1234567) == "-1,234,567");
}

TEST_CASE("size arithmetic does not wrap") {
  CHECK_THROWS_AS(checked_mul(std::int64_t{1} << 40, std::int64_t{1} << 40), Error);
  CHECK(checked_mul(1 << 20, 1 << 20) == std::int64_t{1} << 40);
  CHECK(ceil_div(65, 64) == 2);
  CHECK(round_up(65, 64) == 128);
}

TEST_CASE("the nearest spelling is offered, an unrelated one is not") {
  CHECK(nearest("moe_atc", {"moe", "moe_act", "mlp"}) == "moe_act");
  CHECK(nearest("zzzzzz", {"moe", "moe_act", "mlp"}).empty());
}

TEST_CASE("revisions compose with +") {
  Revision r = Revision::parse("main+l2norm_kernel+gdn_qkv");
  CHECK(r.has("gdn_qkv"));
  CHECK(r.text() == "main+gdn_qkv+l2norm_kernel");
  CHECK_THROWS_AS(Revision::parse("man"), Error);
  CHECK_THROWS_AS(Revision::parse("main+gdn_qvk"), Error);
}

TEST_CASE("error codes map to the documented exit status") {
  CHECK(exit_status(ErrorCode::Config) == 2);
  CHECK(exit_status(ErrorCode::DoesNotFit) == 3);
  CHECK(exit_status(ErrorCode::NoDevice) == 4);
  CHECK(exit_status(ErrorCode::Numeric) == 5);
  CHECK(exit_status(ErrorCode::Interrupted) == 130);
}
