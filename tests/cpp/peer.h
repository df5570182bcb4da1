// A peer in a process of its own, which can be stopped and killed, and what its tests share.
#ifndef TESTS_CPP_PEER_H_
#define TESTS_CPP_PEER_H_

#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "check.h"

using namespace llm_datadist;

constexpr int32_t kLong = 60000;  // milliseconds
constexpr size_t kRows = 8;
constexpr size_t kRowValues = 16;

inline std::map<std::string, std::string> PeerOptions(const std::string &listen) {
  std::map<std::string, std::string> options{{OPTION_DEVICE_ID, "0"},
                                             {OPTION_BUF_POOL_CFG, "{\"buf_pool_size\":1048576}"},
                                             {OPTION_SYNC_CACHE_WAIT_TIME, "600000"},
                                             {"llm.LinkTransport", "tcp"},
                                             {"llm.LinkSilence", "600000"}};
  if (!listen.empty()) {
    options[OPTION_LISTEN_IP_INFO] = listen;
  }
  return options;
}

// Cluster 2 at a port of this host.
inline ClusterInfo Cluster2(uint16_t port) {
  ClusterInfo peer{};
  peer.remote_cluster_id = 2;
  peer.local_ip_infos.resize(1);
  peer.local_ip_infos[0].ip = "127.0.0.1";
  peer.remote_ip_infos.resize(1);
  peer.remote_ip_infos[0].ip = "127.0.0.1";
  peer.remote_ip_infos[0].port = port;
  return peer;
}

inline bool Readable(int descriptor, int milliseconds) {
  pollfd waited{descriptor, POLLIN, 0};
  CHECK(poll(&waited, 1, milliseconds) >= 0);
  return (waited.revents & POLLIN) != 0;
}

// A process with an engine, cluster 2, whose cache has the id 1. It is forked before this process has an engine.
class Peer {
 public:
  Peer() {
    int ends[2];
    CHECK(pipe(ends) == 0);
    child_ = fork();
    if (child_ == 0) {
      CHECK(prctl(PR_SET_PDEATHSIG, SIGKILL) == 0);  // also if a check fails
      LlmDataDist engine(2, LlmRole::kPrompt);
      Cache cache{};
      CHECK_STATUS(engine.Initialize(PeerOptions("127.0.0.1:0")), LLM_SUCCESS);
      CHECK_STATUS(engine.AllocateCache(Int32Desc(2, {kRows, kRowValues}), cache), LLM_SUCCESS);
      Fill(cache, kRows * kRowValues, 7);
      const uint16_t port = engine.ListeningPort();
      CHECK(write(ends[1], &port, sizeof(port)) == static_cast<ssize_t>(sizeof(port)));
      while (true) {
        (void)pause();
      }
    }
    CHECK(child_ > 0);
    CHECK(read(ends[0], &port_, sizeof(port_)) == static_cast<ssize_t>(sizeof(port_)));
    (void)close(ends[0]);
    (void)close(ends[1]);
  }
  ~Peer() { Kill(); }
  Peer(const Peer &) = delete;
  Peer &operator=(const Peer &) = delete;

  void Link(LlmDataDist &engine) const {
    std::vector<Status> rets;
    CHECK_STATUS(engine.LinkLlmClusters({Cluster2(port_)}, rets, kLong), LLM_SUCCESS);
  }

  void Stop() const {
    int status = 0;
    CHECK(kill(child_, SIGSTOP) == 0);
    CHECK(waitpid(child_, &status, WUNTRACED) == child_ && WIFSTOPPED(status));
  }

  void Continue() const { CHECK(kill(child_, SIGCONT) == 0); }

  void Kill() {
    if (child_ > 0) {
      (void)kill(child_, SIGKILL);
      (void)waitpid(child_, nullptr, 0);
      child_ = -1;
    }
  }

 private:
  pid_t child_ = -1;
  uint16_t port_ = 0;
};

#endif  // TESTS_CPP_PEER_H_
