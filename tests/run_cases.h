#pragma once
#include <doctest/doctest.h>

#include <cstdio>

// What a test program's main calls, in the one file that implements doctest. Meson runs a program's files one by one
// (--source-file), and a filter that matches nothing would pass.
namespace gdn::test {

inline int cases_run = 0;

struct CaseCounter : doctest::IReporter {
  explicit CaseCounter(const doctest::ContextOptions&) {}
  void report_query(const doctest::QueryData&) override {}
  void test_run_start() override {}
  void test_run_end(const doctest::TestRunStats& all) override { cases_run = static_cast<int>(all.numTestCasesPassingFilters); }
  void test_case_start(const doctest::TestCaseData&) override {}
  void test_case_reenter(const doctest::TestCaseData&) override {}
  void test_case_end(const doctest::CurrentTestCaseStats&) override {}
  void test_case_exception(const doctest::TestCaseException&) override {}
  void subcase_start(const doctest::SubcaseSignature&) override {}
  void subcase_end() override {}
  void log_assert(const doctest::AssertData&) override {}
  void log_message(const doctest::MessageData&) override {}
  void test_case_skipped(const doctest::TestCaseData&) override {}
};
REGISTER_LISTENER("case_counter", 1, CaseCounter);

// 0 where every case that the arguments choose passed, and they chose one.
inline int run_cases(int argc, char** argv) {
  doctest::Context context(argc, argv);
  const int failed = context.run();
  if (context.shouldExit()) return failed; // asked for its options, or a list
  if (cases_run == 0) std::puts("no test case has this name, or this file");
  return cases_run ? failed : 1;
}

} // namespace gdn::test
