// The log callback: which lines it gets, on which threads, and that it gets none after it was replaced. Not for: the text
// of the lines, or standard error (crates/capi/src/tests/log.rs).
#include <atomic>
#include <cstring>
#include <mutex>
#include <thread>

#include "check.h"

using namespace llm_datadist;

namespace {

struct Line {
  LogLevel level;
  std::string target;
  std::string text;
  std::thread::id thread;
};

struct Lines {
  std::mutex lock;
  std::vector<Line> all;

  LogCallback Callback() {
    return [this](LogLevel level, const char *target, const char *text) {
      const std::lock_guard<std::mutex> guard(lock);
      all.push_back({level, target, text, std::this_thread::get_id()});
    };
  }

  size_t Count() {
    const std::lock_guard<std::mutex> guard(lock);
    return all.size();
  }
};

// Links two objects and unlinks them: both sides log.
void Link(LlmDataDist &engine, uint16_t port) {
  std::vector<Status> rets;
  ClusterInfo peer{};
  peer.remote_cluster_id = 2;
  peer.local_ip_infos.resize(1);
  peer.local_ip_infos[0].ip = "127.0.0.1";
  peer.remote_ip_infos.resize(1);
  peer.remote_ip_infos[0].ip = "127.0.0.1";
  peer.remote_ip_infos[0].port = port;
  CHECK_STATUS(engine.LinkLlmClusters({peer}, rets, 20000), LLM_SUCCESS);
  CHECK_STATUS(engine.UnlinkLlmClusters({peer}, rets, 20000), LLM_SUCCESS);
}

}  // namespace

int main() {
  Lines every;
  Lines errors;
  Lines last;
  CHECK_STATUS(LlmDataDist::SetLogCallback(every.Callback(), LogLevel::kDebug), LLM_SUCCESS);
  LlmDataDist local(1, LlmRole::kDecoder);
  LlmDataDist remote(2, LlmRole::kPrompt);
  const std::map<std::string, std::string> small = {{OPTION_DEVICE_ID, "0"},
                                                    {OPTION_BUF_POOL_CFG, "{\"buf_pool_size\":1048576}"}};
  auto listening = small;
  listening[OPTION_LISTEN_IP_INFO] = "127.0.0.1:0";
  CHECK_STATUS(local.Initialize(small), LLM_SUCCESS);
  CHECK_STATUS(remote.Initialize(listening), LLM_SUCCESS);

  Link(local, remote.ListeningPort());
  bool elsewhere = false;
  {
    const std::lock_guard<std::mutex> guard(every.lock);
    CHECK(!every.all.empty());
    for (const auto &line : every.all) {
      CHECK(line.level >= LogLevel::kError && line.level <= LogLevel::kDebug);
      CHECK(line.target.compare(0, 14, "llm_datadist::") == 0);
      CHECK(!line.text.empty() && line.text.find('\n') == std::string::npos);
      elsewhere = elsewhere || line.thread != std::this_thread::get_id();
    }
  }
  CHECK(elsewhere);  // the side that listens logs on a thread of its own

  // After a replacement, the old callback gets no more lines, and the new one only lines up to its level.
  CHECK_STATUS(LlmDataDist::SetLogCallback(errors.Callback(), LogLevel::kError), LLM_SUCCESS);
  const size_t before = every.Count();
  Link(local, remote.ListeningPort());
  CHECK(every.Count() == before);
  CHECK(errors.Count() == 0);

  // Without a callback, nothing is called.
  CHECK_STATUS(LlmDataDist::SetLogCallback(nullptr), LLM_SUCCESS);
  Link(local, remote.ListeningPort());
  CHECK(every.Count() == before && errors.Count() == 0);

  // A callback that replaces the callback gets an error, and nothing hangs.
  std::atomic<int> refused{0};
  CHECK_STATUS(LlmDataDist::SetLogCallback([&refused](LogLevel, const char *, const char *) {
                 if (llm_datadist_set_log_callback(nullptr, nullptr, 0) != LLM_SUCCESS) {
                   CHECK(std::strstr(llm_datadist_last_error(), "inside the callback") != nullptr);
                   ++refused;
                 }
               }),
               LLM_SUCCESS);
  Link(local, remote.ListeningPort());
  CHECK(refused > 0);

  // An invalid level changes nothing.
  CHECK_STATUS(LlmDataDist::SetLogCallback(last.Callback(), static_cast<LogLevel>(5)), LLM_PARAM_INVALID);
  CHECK_STATUS(LlmDataDist::SetLogCallback(last.Callback(), static_cast<LogLevel>(0)), LLM_PARAM_INVALID);
  CHECK(LastErrorMessage().find("max_level=0") != std::string::npos);
  const int so_far = refused;
  Link(local, remote.ListeningPort());
  CHECK(refused > so_far && last.Count() == 0);

  CHECK_STATUS(LlmDataDist::SetLogCallback(last.Callback()), LLM_SUCCESS);
  local.Finalize();
  remote.Finalize();
  CHECK_STATUS(LlmDataDist::SetLogCallback(nullptr), LLM_SUCCESS);
  std::cout << "logged" << std::endl;
  return 0;
}
