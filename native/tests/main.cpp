// Runs the tests whose "group.name" contains the first argument (all without one). Prints each name before it runs, so
// that the last line tells which test a crash belongs to.
#include <string>

#include "check.h"

int main(int argc, char **argv) {
  const std::string wanted = argc > 1 ? argv[1] : "";
  int ran = 0;
  for (qt_test::Test *test = qt_test::Test::first(); test; test = test->next) {
    const std::string name = std::string(test->group) + "." + test->name;
    if (name.find(wanted) == std::string::npos) continue;
    const int before = qt_test::failures();
    std::printf("%s ", name.c_str());
    std::fflush(stdout);
    test->run();
    std::printf("%s\n", qt_test::failures() == before ? "ok" : "FAILED");
    std::fflush(stdout);
    ++ran;
  }
  std::printf("%d tests, %d failed checks\n", ran, qt_test::failures());
  return ran == 0 || qt_test::failures() != 0;
}
