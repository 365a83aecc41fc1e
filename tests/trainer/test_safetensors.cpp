#include <doctest/doctest.h>

#include <cstring>

#include "core/error.h"
#include "tests/trainer/mutate.h"
#include "tests/temporary_folder.h"
#include "trainer/safetensors.h"

using namespace gdn;
using namespace gdn::trainer;
using test::TemporaryFolder;

namespace {

// A file with this header text and as many data bytes, written by hand.
std::string file_of(const std::string& json, size_t data_bytes) {
  std::string bytes(8, '\0');
  const std::uint64_t length = json.size();
  std::memcpy(bytes.data(), &length, 8);
  return bytes + json + std::string(data_bytes, '\x2a');
}

std::string refusal(const std::string& bytes) {
  try {
    parse_safetensors(bytes, "w.safetensors");
  } catch (const Error& e) {
    CHECK(e.code() == ErrorCode::Checkpoint);
    return e.what();
  }
  return "accepted";
}

std::string refusal(const std::string& json, size_t data_bytes) { return refusal(file_of(json, data_bytes)); }

void check_mentions(const std::string& message, std::initializer_list<const char*> words) {
  for (const char* w : words) {
    INFO(message);
    CHECK(message.find(w) != std::string::npos);
  }
}

} // namespace

TEST_CASE("safetensors: a header written by hand is read") {
  const std::string json = R"({"__metadata__":{"format":"pt","b":"1"},)"
                           R"("late":{"dtype":"I64","shape":[2],"data_offsets":[28,44]},)"
                           R"("w":{"shape":[2,3],"data_offsets":[0,24],"dtype":"F32"},)"
                           R"("scalar":{"dtype":"BF16","shape":[],"data_offsets":[24,26]},)"
                           R"("none":{"dtype":"F32","shape":[0,7],"data_offsets":[26,26]},)"
                           R"("half":{"dtype":"F16","shape":[1],"data_offsets":[26,28]}}   )";
  const SafetensorsHeader h = parse_safetensors(file_of(json, 44), "w.safetensors");
  REQUIRE(h.tensors.size() == 5);
  CHECK(h.metadata == Metadata{{"format", "pt"}, {"b", "1"}});
  CHECK(h.tensors[0].name == "w"); // in the order of their data, not of the header
  CHECK(h.tensors[0].shape == std::vector<std::int64_t>{2, 3});
  CHECK(h.tensors[0].offset == 8 + static_cast<Bytes>(json.size()));
  CHECK(h.tensors[1].name == "scalar");
  CHECK(h.tensors[1].elements() == 1);
  CHECK(h.tensors[2].name == "none");
  CHECK(h.tensors[2].bytes() == 0);
  CHECK(h.tensors[4].dtype == DType::Int64);
}

TEST_CASE("safetensors: every lie in a header is refused by name") {
  auto tensor = [](const char* fields) { return std::string(R"({"w":{)") + fields + "}}"; };
  const char* good = R"("dtype":"F32","shape":[2],"data_offsets":[0,8])";
  REQUIRE(refusal(tensor(good), 8) == "accepted");

  SUBCASE("length of the header") {
    check_mentions(refusal("abc"), {"w.safetensors", "3 bytes", "too short"});
    check_mentions(refusal(file_of(tensor(good), 8).substr(0, 20)), {"beyond the end", "truncated"});
    std::string huge = file_of(tensor(good), 8);
    for (int i = 0; i < 8; ++i) huge[static_cast<size_t>(i)] = '\xff';
    check_mentions(refusal(huge), {"18446744073709551615", "limit"});
  }
  SUBCASE("JSON") {
    check_mentions(refusal("", 0), {"does not begin with '{'"});
    check_mentions(refusal("[1]", 0), {"does not begin with '{'"});
    check_mentions(refusal(R"({"w":)", 0), {"not JSON"});
    check_mentions(refusal("{}x", 0), {"not JSON"});
    check_mentions(refusal("{\"\xff\":{}}", 0), {"not JSON"});
    check_mentions(refusal(R"({"w":[1]})", 0), {"'w'", "list"});
    check_mentions(refusal(R"({"w":7})", 0), {"'w'", "7"});
    check_mentions(refusal(R"({"__metadata__":{"a":1}})", 0), {"metadata 'a'", "expected text"});
    check_mentions(refusal(R"({"__metadata__":{"a":"1","a":"2"}})", 0), {"metadata 'a'", "twice"});
    check_mentions(refusal(std::string(100000, '[').insert(0, "{\"w\":"), 0), {"'w'"});
  }
  SUBCASE("fields") {
    check_mentions(refusal(tensor(R"("dtype":"F32","shape":[2])"), 8), {"'w'", "data_offsets", "missing"});
    check_mentions(refusal(tensor(R"("shape":[2],"data_offsets":[0,8])"), 8), {"'w'", "dtype", "missing"});
    check_mentions(refusal(tensor(R"("dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8])"), 8),
                   {"'w'", "dtype", "twice"});
    check_mentions(refusal(tensor(R"("dtype":"F32","shape":[2],"data_offsets":[0,8],"x":1)"), 8), {"'w'", "'x'"});
    check_mentions(refusal(tensor(R"("dtype":"U4","shape":[2],"data_offsets":[0,8])"), 8), {"'w'", "U4", "BF16"});
    check_mentions(refusal(tensor(R"("dtype":5,"shape":[2],"data_offsets":[0,8])"), 8), {"'w'", "dtype", "5"});
    check_mentions(refusal(tensor(R"("dtype":"F32","shape":"2","data_offsets":[0,8])"), 8), {"'w'", "shape"});
    check_mentions(refusal(tensor(R"("dtype":"F32","shape":[[2]],"data_offsets":[0,8])"), 8), {"'w'", "shape"});
  }
  SUBCASE("numbers") {
    for (const char* bad : {"-2", "2.0", "1e3", "9223372036854775808", "1e999", "null", "true", "\"2\""}) {
      CAPTURE(bad);
      const bool overflow = std::string_view(bad) == "1e999"; // refused by the JSON reader itself
      check_mentions(refusal(R"({"w":{"dtype":"F32","data_offsets":[0,8],"shape":[)" + std::string(bad) + "]}}", 8),
                     {"'w'", overflow ? "1e999" : "shape"});
      check_mentions(refusal(R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,)" + std::string(bad) + "]}}", 8),
                     {"'w'", overflow ? "1e999" : "data_offsets"});
    }
    // 2^61 x 4 bytes x 2 wraps to 0 in 64 bits.
    check_mentions(refusal(tensor(R"("dtype":"F32","shape":[2305843009213693952,2],"data_offsets":[0,0])"), 0),
                   {"'w'", "2305843009213693952", "more than"});
  }
  SUBCASE("offsets") {
    check_mentions(refusal(tensor(R"("dtype":"F32","shape":[3],"data_offsets":[0,8])"), 8), {"'w'", "12 bytes", "hold 8"});
    check_mentions(refusal(tensor(R"("dtype":"BF16","shape":[2],"data_offsets":[0,8])"), 8), {"'w'", "4 bytes", "hold 8"});
    check_mentions(refusal(tensor(R"("dtype":"F32","shape":[2],"data_offsets":[8,0])"), 8), {"'w'", "[8, 0]"});
    check_mentions(refusal(tensor(R"("dtype":"F32","shape":[2],"data_offsets":[0,8,8])"), 8), {"'w'", "3 numbers"});
    check_mentions(refusal(tensor(good), 7), {"'w'", "7 data bytes", "truncated"});
    check_mentions(refusal(tensor(good), 9), {"last 1 bytes"});
    check_mentions(refusal(tensor(R"("dtype":"F32","shape":[2],"data_offsets":[4,12])"), 12), {"'w'", "4 bytes before"});
    const std::string two = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":)";
    CHECK(refusal(two + "[8,16]}}", 16) == "accepted");
    check_mentions(refusal(two + "[4,12]}}", 12), {"'b'", "overlaps tensor 'a' by 4"});
    check_mentions(refusal(two + "[0,8]}}", 8), {"'b'", "overlaps tensor 'a' by 8"});
    check_mentions(refusal(two + "[12,20]}}", 20), {"'b'", "4 bytes before"});
    check_mentions(refusal(R"({"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}})", 0),
                   {"'a'", "twice"});
  }
  SUBCASE("a name cannot write on the terminal") {
    const std::string message = refusal(R"({"w\u001b[2J":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", 8);
    CHECK(message.find('\x1b') == std::string::npos);
    check_mentions(message, {"'w?[2J'"});
  }
}

TEST_CASE("safetensors: damaged headers are refused or sound") {
  const std::string seed = file_of(R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
                                   R"("b":{"dtype":"BF16","shape":[],"data_offsets":[24,26]}}      )", 26);
  std::mt19937_64 random(20240229);
  int accepted = 0;
  const int tried = 20000;
  for (int i = 0; i < tried; ++i) accepted += test::survives(test::mutate(seed, random)) ? 1 : 0;
  CHECK(accepted > 0);         // damage to data or to names is no damage to the format
  CHECK(accepted < tried / 2); // most edits must be noticed
}

TEST_CASE("safetensors: the bytes of a written file") {
  // Compact JSON, and data from a multiple of 8 on, as the format's own library writes it.
  TemporaryFolder folder;
  {
    SafetensorsWriter writer(folder / "w", {{"w", DType::FP32, {2}}, {"b\"\xc3\xa9", DType::BF16, {1}}}, {{"format", "pt"}});
    const float ones[2] = {1, 1};
    const std::uint16_t zero = 0;
    writer.write(1, 0, std::as_bytes(std::span(&zero, 1)));
    writer.write(0, 4, std::as_bytes(std::span(ones + 1, 1)));
    writer.write(0, 0, std::as_bytes(std::span(ones, 1)));
    CHECK_FALSE(std::filesystem::exists(folder / "w"));
    writer.commit();
  }
  std::string json = R"({"__metadata__":{"format":"pt"},"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                     "\"b\\\"\xc3\xa9\":{\"dtype\":\"BF16\",\"shape\":[1],\"data_offsets\":[8,10]}}";
  while (json.size() % 8 != 0) json += ' ';
  std::string expected = file_of(json, 0) + std::string("\0\0\x80\x3f\0\0\x80\x3f\0\0", 10);
  CHECK(test::read_bytes(folder / "w") == expected);

  const SafetensorsFile file(folder / "w");
  CHECK(file.metadata() == Metadata{{"format", "pt"}});
  float value = 0;
  std::memcpy(&value, file.data(file.at("w")).data() + 4, 4);
  CHECK(value == 1);
  CHECK_THROWS_WITH_AS(file.at("v"), doctest::Contains("did you mean 'w'"), Error);
}

TEST_CASE("safetensors: an unfinished file never appears") {
  TemporaryFolder folder;
  test::write_bytes(folder / "w", "old");
  const std::byte zeros[8] = {};
  auto files = [&] { return std::distance(std::filesystem::directory_iterator(folder.path()), {}); };
  {
    SafetensorsWriter writer(folder / "w", {{"a", DType::FP32, {2}}});
    writer.write(0, 0, std::span(zeros, 4));
    CHECK_THROWS_WITH_AS(writer.commit(), doctest::Contains("4 of 8 bytes of tensor 'a'"), Error);
    CHECK_THROWS_AS(writer.write(0, 4, std::span(zeros, 8)), Error);  // beyond its end
    CHECK_THROWS_AS(writer.write(0, -1, std::span(zeros, 1)), Error);
  }
  CHECK(test::read_bytes(folder / "w") == "old");
  CHECK(files() == 1);
  CHECK_THROWS_AS(SafetensorsWriter(folder / "w", {{"a"}, {"a"}}), Error);
  CHECK_THROWS_AS(SafetensorsWriter(folder / "none" / "w", {}), Error);
  CHECK(files() == 1);
}

TEST_CASE("safetensors: a missing, empty or foreign file is an error with its name") {
  TemporaryFolder folder;
  CHECK_THROWS_WITH_AS(SafetensorsFile(folder / "none"), doctest::Contains("No such file"), Error);
  CHECK_THROWS_WITH_AS(SafetensorsFile(folder.path()), doctest::Contains("not a regular file"), Error);
  test::write_bytes(folder / "empty", "");
  CHECK_THROWS_WITH_AS(SafetensorsFile(folder / "empty"), doctest::Contains("too short"), Error);
  test::write_bytes(folder / "zip", "PK\x03\x04 a pickled checkpoint of another kind");
  CHECK_THROWS_WITH_AS(SafetensorsFile(folder / "zip"), doctest::Contains("not a safetensors file"), Error);
}
