// Helpers of the programs: checks that print where they failed, and tensors with known values.
#ifndef TESTS_CPP_CHECK_H_
#define TESTS_CPP_CHECK_H_

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "llm_datadist/llm_datadist.h"

#define CHECK(condition)                                                                                   \
  do {                                                                                                     \
    if (!(condition)) {                                                                                    \
      std::cerr << __FILE__ << ":" << __LINE__ << ": " #condition << "; last error: "                      \
                << llm_datadist::LastErrorMessage() << std::endl;                                          \
      std::exit(1);                                                                                        \
    }                                                                                                      \
  } while (false)

#define CHECK_STATUS(call, expected)                                                                       \
  do {                                                                                                     \
    const llm_datadist::Status got = (call);                                                               \
    if (got != (expected)) {                                                                               \
      std::cerr << __FILE__ << ":" << __LINE__ << ": " #call " gave " << std::hex << got << ", not "       \
                << (expected) << "; last error: " << llm_datadist::LastErrorMessage() << std::endl;        \
      std::exit(1);                                                                                        \
    }                                                                                                      \
  } while (false)

// The number that element `at` of tensor `tensor` is filled with.
inline int32_t Pattern(int32_t seed, size_t tensor, size_t at) {
  return seed * 1000000 + static_cast<int32_t>(tensor) * 10000 + static_cast<int32_t>(at);
}

inline int32_t *Values(const llm_datadist::Cache &cache, size_t tensor) {
  return reinterpret_cast<int32_t *>(cache.tensor_addrs[tensor]);
}

inline void Fill(const llm_datadist::Cache &cache, size_t values, int32_t seed) {
  for (size_t tensor = 0; tensor < cache.tensor_addrs.size(); ++tensor) {
    for (size_t at = 0; at < values; ++at) {
      Values(cache, tensor)[at] = Pattern(seed, tensor, at);
    }
  }
}

inline llm_datadist::CacheDesc Int32Desc(uint32_t num_tensors, const std::vector<int64_t> &shape,
                                         llm_datadist::CachePlacement placement = llm_datadist::CachePlacement::kDevice) {
  llm_datadist::CacheDesc desc{};
  desc.placement = placement;
  desc.num_tensors = num_tensors;
  desc.data_type = llm_datadist::DT_INT32;
  desc.shape = shape;
  return desc;
}

#endif  // TESTS_CPP_CHECK_H_
