// The example of the page PushKvCache.md as a program, in two processes.
//
// `seed_push receive` is cluster 0: it listens, allocates the cache with id 1 and prints its port. For each line that it
// reads, it verifies the values of the cache. `seed_push push PORT` links and runs the example. `seed_push both` does both
// in one process. Not for: other calls (end.cpp).
#include <memory>

#include "check.h"

using namespace llm_datadist;

namespace {

constexpr size_t kValues = 64;

class Receiver {
 public:
  Receiver() : engine_(0, LlmRole::kDecoder) {
    CHECK_STATUS(engine_.Initialize({{OPTION_DEVICE_ID, "0"}, {OPTION_LISTEN_IP_INFO, "127.0.0.1:0"}}), LLM_SUCCESS);
    CHECK_STATUS(engine_.AllocateCache(Int32Desc(4, {4, 16}), cache_), LLM_SUCCESS);
    CHECK(cache_.cache_id == 1);
    Fill(cache_, kValues, 1);
  }

  uint16_t Port() const { return engine_.ListeningPort(); }

  // Checks that slot 3 of tensor 3 has the values of the pusher, and that all other values are unchanged.
  void Verify() const {
    for (size_t tensor = 0; tensor < 4; ++tensor) {
      for (size_t at = 0; at < kValues; ++at) {
        CHECK(Values(cache_, tensor)[at] == Pattern(tensor == 3 && at >= 48 ? 2 : 1, tensor, at));
      }
    }
    std::cout << "received" << std::endl;
  }

 private:
  LlmDataDist engine_;
  Cache cache_;
};

void Push(uint16_t port) {
  LlmDataDist llm_datadist(1, LlmRole::kPrompt);
  CHECK_STATUS(llm_datadist.Initialize({{OPTION_DEVICE_ID, "0"}}), LLM_SUCCESS);
  ClusterInfo peer{};
  peer.remote_cluster_id = 0;
  peer.local_ip_infos.resize(1);
  peer.local_ip_infos[0].ip = "127.0.0.1";
  peer.remote_ip_infos.resize(1);
  peer.remote_ip_infos[0].ip = "127.0.0.1";
  peer.remote_ip_infos[0].port = port;
  std::vector<Status> rets;
  CHECK_STATUS(llm_datadist.LinkLlmClusters({peer}, rets, 5000), LLM_SUCCESS);
  CHECK(rets == std::vector<Status>{LLM_SUCCESS});
  // The example pushes a cache right after its allocation. That cache reuses the memory, and the values, of `before`.
  Cache before{};
  CHECK_STATUS(llm_datadist.AllocateCache(Int32Desc(4, {4, 16}), before), LLM_SUCCESS);
  Fill(before, kValues, 2);
  CHECK_STATUS(llm_datadist.DeallocateCache(before.cache_id), LLM_SUCCESS);
#include "seed_push.inc"
  CHECK_STATUS(ret, LLM_SUCCESS);
  CHECK(Values(cache, 3)[63] == Pattern(2, 3, 63));
  CHECK_STATUS(llm_datadist.UnlinkLlmClusters({peer}, rets, 5000), LLM_SUCCESS);
  CHECK_STATUS(llm_datadist.PushKvCache(cache, dst_cache_key, 3, -1, ext_param), LLM_NOT_YET_LINK);
  std::cout << "pushed" << std::endl;
}

}  // namespace

int main(int argc, char **argv) {
  const std::string part = argc > 1 ? argv[1] : "both";
  if (part == "push") {
    Push(static_cast<uint16_t>(std::stoi(argv[2])));
    return 0;
  }
  const Receiver receiver;
  if (part == "both") {
    Push(receiver.Port());
    receiver.Verify();
    return 0;
  }
  std::cout << receiver.Port() << std::endl;
  std::string line;
  while (std::getline(std::cin, line)) {
    receiver.Verify();
  }
  return 0;
}
