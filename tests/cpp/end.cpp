// One object of the C++ class, controlled by commands on standard input: the C++ counterpart of `End` in tests/peers.
//
// Each line is a command and its arguments. The answer is one line: the status in hexadecimal, and the results.
// Not for: checking results (tests/test_cpp.py does).
#include <cstring>
#include <iostream>
#include <memory>
#include <sstream>

#include "llm_datadist/llm_datadist.h"

using namespace llm_datadist;

namespace {

constexpr const char *kDigits = "0123456789abcdef";

class End {
 public:
  End(uint64_t cluster, int32_t role) : engine_(cluster, static_cast<LlmRole>(role)) {}

  // The answer to one command.
  std::string Do(const std::string &line) {
    std::istringstream words(line);
    std::string command;
    words >> command;
    std::ostringstream said;
    const Status status = Run(command, words, said);
    std::ostringstream answer;
    answer << std::hex << status << said.str();
    if (status != LLM_SUCCESS) {
      answer << " | " << LastErrorMessage();
    }
    return answer.str();
  }

 private:
  template <typename T>
  static T Next(std::istringstream &words) {
    T value{};
    words >> value;
    return value;
  }

  static std::vector<uint64_t> List(std::istringstream &words) {
    std::vector<uint64_t> list(Next<size_t>(words));
    for (auto &value : list) {
      words >> value;
    }
    return list;
  }

  static std::map<std::string, std::string> Options(std::istringstream &words) {
    std::map<std::string, std::string> options;
    std::string pair;
    while (words >> pair) {
      options[pair.substr(0, pair.find('='))] = pair.substr(pair.find('=') + 1);
    }
    return options;
  }

  static CacheDesc Desc(std::istringstream &words) {
    CacheDesc desc{};
    desc.placement = static_cast<CachePlacement>(Next<uint32_t>(words));
    desc.num_tensors = Next<uint32_t>(words);
    desc.data_type = static_cast<DataType>(Next<int32_t>(words));
    desc.shape = {Next<int64_t>(words), Next<int64_t>(words)};
    return desc;
  }

  static CacheIndex Index(std::istringstream &words) {
    const auto cluster = Next<uint64_t>(words);
    const auto cache = Next<int64_t>(words);
    return {cluster, cache, Next<uint32_t>(words)};
  }

  static KvCacheExtParam Ext(std::istringstream &words) {
    KvCacheExtParam ext{};
    int32_t first = 0;
    int32_t last = 0;
    int32_t count = 0;
    if (words >> first >> last) {
      ext.src_layer_range = {first, last};
      words >> first >> last >> count;
      ext.dst_layer_range = {first, last};
      ext.tensor_num_per_layer = static_cast<uint8_t>(count);
    }
    return ext;
  }

  static std::vector<ClusterInfo> Peers(std::istringstream &words) {
    ClusterInfo peer{};
    peer.remote_cluster_id = Next<uint64_t>(words);
    peer.local_ip_infos.resize(1);
    peer.local_ip_infos[0].ip = "127.0.0.1";
    peer.remote_ip_infos.resize(1);
    peer.remote_ip_infos[0].ip = "127.0.0.1";
    peer.remote_ip_infos[0].port = Next<uint16_t>(words);
    return {peer};
  }

  // The cache called by the next word.
  Cache &Named(std::istringstream &words) { return caches_[Next<std::string>(words)]; }

  Status Keep(const std::string &name, const CacheDesc &desc, const std::vector<uint64_t> &addrs, int64_t id) {
    Cache cache{};
    cache.cache_id = id;
    cache.cache_desc = desc;
    cache.tensor_addrs.assign(addrs.begin(), addrs.end());
    caches_[name] = cache;
    return LLM_SUCCESS;
  }

  // Allocates memory of this program for each tensor of 8-bit elements. Returns the addresses.
  std::vector<uint64_t> Own(const CacheDesc &desc) {
    std::vector<uint64_t> addrs;
    for (uint32_t tensor = 0; tensor < desc.num_tensors; ++tensor) {
      memory_.emplace_back(new std::vector<uint8_t>(static_cast<size_t>(desc.shape[0] * desc.shape[1])));
      addrs.push_back(reinterpret_cast<uintptr_t>(memory_.back()->data()));
    }
    return addrs;
  }

  static size_t Bytes(const Cache &cache) {
    return static_cast<size_t>(cache.cache_desc.shape[0] * cache.cache_desc.shape[1]);
  }

  Status Run(const std::string &command, std::istringstream &words, std::ostringstream &said) {
    if (command == "init") {
      const Status status = engine_.Initialize(Options(words));
      said << " " << engine_.ListeningPort();
      return status;
    }
    if (command == "finalize") {
      engine_.Finalize();
      return LLM_SUCCESS;
    }
    if (command == "set_role") {
      const auto role = static_cast<LlmRole>(Next<int32_t>(words));
      const Status status = engine_.SetRole(role, Options(words));
      said << " " << engine_.ListeningPort();
      return status;
    }
    if (command == "link" || command == "unlink" || command == "force") {
      const auto peers = Peers(words);
      std::vector<Status> rets(3, 7U);
      const Status status = command == "link" ? engine_.LinkLlmClusters(peers, rets, 5000)
                                              : engine_.UnlinkLlmClusters(peers, rets, 5000, command == "force");
      for (const Status ret : rets) {
        said << " " << std::hex << ret;
      }
      return status;
    }
    return Caches(command, words, said);
  }

  Status Caches(const std::string &command, std::istringstream &words, std::ostringstream &said) {
    if (command == "allocate") {
      const auto name = Next<std::string>(words);
      const Status status = engine_.AllocateCache(Desc(words), caches_[name]);
      said << " " << std::dec << caches_[name].cache_id;
      return status;
    }
    if (command == "register") {
      const auto name = Next<std::string>(words);
      const auto desc = Desc(words);
      const auto addrs = Own(desc);
      int64_t id = -1;
      const Status status = engine_.RegisterKvCache(desc, addrs, RegisterCfg{}, id);
      said << " " << std::dec << id;
      return status == LLM_SUCCESS ? Keep(name, desc, addrs, id) : status;
    }
    if (command == "loose") {
      const auto name = Next<std::string>(words);
      const auto desc = Desc(words);
      return Keep(name, desc, Own(desc), -1);
    }
    if (command == "deallocate") {
      return engine_.DeallocateCache(Next<int64_t>(words));
    }
    if (command == "unregister") {
      return engine_.UnregisterKvCache(Next<int64_t>(words));
    }
    // Members of the structure that a program may set itself.
    if (command == "claim") {
      Cache &cache = Named(words);
      cache.cache_id = Next<int64_t>(words);
      cache.cache_desc.shape[0] = Next<int64_t>(words);
      cache.tensor_addrs.resize(Next<size_t>(words));
      return LLM_SUCCESS;
    }
    if (command == "place") {
      Cache &cache = Named(words);
      cache.cache_desc.placement = static_cast<CachePlacement>(Next<uint32_t>(words));
      return LLM_SUCCESS;
    }
    if (command == "write" || command == "read") {
      return Content(command, words, said);
    }
    return Transfers(command, words);
  }

  // Bytes of every tensor in hexadecimal.
  Status Content(const std::string &command, std::istringstream &words, std::ostringstream &said) {
    const Cache &cache = Named(words);
    for (const uintptr_t addr : cache.tensor_addrs) {
      auto *bytes = reinterpret_cast<uint8_t *>(addr);
      if (command == "write") {
        const auto text = Next<std::string>(words);
        for (size_t at = 0; at < Bytes(cache); ++at) {
          bytes[at] = static_cast<uint8_t>(std::stoi(text.substr(2 * at, 2), nullptr, 16));
        }
      } else {
        said << " ";
        for (size_t at = 0; at < Bytes(cache); ++at) {
          said << kDigits[bytes[at] >> 4U] << kDigits[bytes[at] & 15U];
        }
      }
    }
    return LLM_SUCCESS;
  }

  Status Transfers(const std::string &command, std::istringstream &words) {
    if (command == "pull" || command == "pull_blocks") {
      return Pull(command, words);
    }
    if (command == "push" || command == "push_blocks") {
      return Push(command, words);
    }
    if (command == "copy" || command == "copy_blocks") {
      return Copy(command, words);
    }
    std::cerr << "no such command: " << command << std::endl;
    std::exit(2);
  }

  Status Pull(const std::string &command, std::istringstream &words) {
    const CacheIndex src = Index(words);
    const Cache &dst = Named(words);
    if (command == "pull") {
      const auto row = Next<uint32_t>(words);
      const auto size = Next<int64_t>(words);
      const auto ext = Ext(words);
      return engine_.PullKvCache(src, dst, row, size, ext);
    }
    const auto from = List(words);
    const auto into = List(words);
    const auto ext = Ext(words);
    return engine_.PullKvBlocks(src, dst, from, into, ext);
  }

  Status Push(const std::string &command, std::istringstream &words) {
    const Cache &src = Named(words);
    const CacheIndex dst = Index(words);
    if (command == "push") {
      const auto row = Next<uint32_t>(words);
      const auto size = Next<int64_t>(words);
      const auto ext = Ext(words);
      return engine_.PushKvCache(src, dst, row, size, ext);
    }
    const auto from = List(words);
    const auto into = List(words);
    const auto ext = Ext(words);
    return engine_.PushKvBlocks(src, dst, from, into, ext);
  }

  Status Copy(const std::string &command, std::istringstream &words) {
    const Cache &src = Named(words);
    const Cache &dst = Named(words);
    if (command == "copy") {
      const auto from = Next<uint32_t>(words);
      const auto into = Next<uint32_t>(words);
      const auto offset = Next<uint64_t>(words);
      const auto size = Next<int64_t>(words);
      return engine_.CopyKvCache(src, dst, from, into, offset, size);
    }
    const auto from = List(words);
    std::vector<std::vector<uint64_t>> lists(Next<size_t>(words));
    for (auto &list : lists) {
      list = List(words);
    }
    return engine_.CopyKvBlocks(src, dst, from, lists);
  }

  LlmDataDist engine_;
  std::map<std::string, Cache> caches_;
  std::vector<std::unique_ptr<std::vector<uint8_t>>> memory_;
};

}  // namespace

int main(int argc, char **argv) {
  if (argc != 3) {
    return 2;
  }
  End end(std::stoull(argv[1]), std::stoi(argv[2]));
  std::string line;
  while (std::getline(std::cin, line)) {
    std::cout << end.Do(line) << std::endl;
  }
  return 0;
}
