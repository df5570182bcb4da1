/* The native API in C, in two processes: `native both TRANSPORT`. The first process pulls and pushes; the second one owns a cache and
 * answers messages, until it is killed.
 *
 * `native serve TRANSPORT` is the second process alone: it prints its address, and ends with its standard input. `native pull ADDRESS`
 * pulls block 3 of the cache "kv" of any engine, and prints its bytes in hexadecimal. Not for: wrong arguments,
 * handles, grants and events (crates/capi/src/tests), or peers that stop or die (tests/native). */
#define _GNU_SOURCE
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "llm_datadist/llm_datadist_c.h"

enum { BLOCKS = 16, BLOCK = 256, LAYERS = 3, TENSORS = 2 * LAYERS, MAX_EVENTS = 64 };

static const double LONG = 60.0;

#define CHECK(condition)                                                                                   \
  do {                                                                                                     \
    if (!(condition)) {                                                                                    \
      fprintf(stderr, "%s:%d: %s; last error: %s\n", __FILE__, __LINE__, #condition, llm_datadist_last_error()); \
      exit(1);                                                                                             \
    }                                                                                                      \
  } while (0)

#define CHECK_STATUS(call, expected)                                                                       \
  do {                                                                                                     \
    const uint32_t got = (call);                                                                           \
    if (got != (expected)) {                                                                               \
      fprintf(stderr, "%s:%d: %s gave %u; last error: %s\n", __FILE__, __LINE__, #call, got,               \
              llm_datadist_last_error());                                                                  \
      exit(1);                                                                                             \
    }                                                                                                      \
  } while (0)

typedef struct {
  uint64_t engine;
  uint64_t cache;
  uint8_t *tensors[TENSORS];
  int descriptor;
} Node;

static uint8_t pattern(int seed, int tensor, int at) {
  return (uint8_t)(seed * 131 + tensor * 29 + at * 7 + at / 256);
}

static void fill(const Node *node, int seed) {
  for (int tensor = 0; tensor < TENSORS; ++tensor) {
    for (int at = 0; at < BLOCKS * BLOCK; ++at) {
      node->tensors[tensor][at] = pattern(seed, tensor, at);
    }
  }
}

/* Whether the tensors of some layers have, in `block`, the bytes that block `from` has after fill(seed). */
static int has_layers(const Node *node, int block, int seed, int from, int first, int end) {
  for (int tensor = 2 * first; tensor < 2 * end; ++tensor) {
    for (int at = 0; at < BLOCK; ++at) {
      if (node->tensors[tensor][block * BLOCK + at] != pattern(seed, tensor, from * BLOCK + at)) {
        return 0;
      }
    }
  }
  return 1;
}

static int has(const Node *node, int block, int seed, int from) { return has_layers(node, block, seed, from, 0, LAYERS); }

static void open_node(Node *node, const char *name, const char *transport, const char *listen) {
  const LlmDatadistOption options[] = {
      {"pool", "1MiB"}, {"page", "4KiB"},     {"name", name},         {"timeout", "60"},
      {"silence", "600"}, {"transport", transport}, {"listen", listen},
  };
  const int64_t shape[] = {BLOCK / 4};
  const LlmDatadistForm form = {
      .blocks = BLOCKS, .dtype = "float32", .shape = shape, .num_dims = 1, .tensors = TENSORS, .tensors_per_layer = 2};
  CHECK_STATUS(llm_datadist_engine_open(options, listen == NULL ? 6 : 7, &node->engine), LLM_DATADIST_SUCCESS);
  CHECK_STATUS(llm_datadist_allocate(node->engine, "kv", &form, &node->cache), LLM_DATADIST_SUCCESS);
  void *addresses[TENSORS];
  CHECK_STATUS(llm_datadist_cache_tensors(node->cache, addresses, TENSORS), LLM_DATADIST_SUCCESS);
  for (int tensor = 0; tensor < TENSORS; ++tensor) {
    node->tensors[tensor] = addresses[tensor];
  }
  CHECK_STATUS(llm_datadist_event_descriptor(node->engine, &node->descriptor), LLM_DATADIST_SUCCESS);
}

/* Waits for the next event, which is valid until the next call. */
static LlmDatadistEvent next_event(const Node *node) {
  LlmDatadistEvent event;
  size_t count = 0;
  while (count == 0) {
    struct pollfd readable = {node->descriptor, POLLIN, 0};
    CHECK(poll(&readable, 1, 60000) == 1);
    CHECK_STATUS(llm_datadist_events(node->engine, 1, &event, &count), LLM_DATADIST_SUCCESS);
  }
  return event;
}

static LlmDatadistEvent next_of_kind(const Node *node, uint32_t kind) {
  LlmDatadistEvent event = next_event(node);
  CHECK(event.kind == kind);
  return event;
}

static int says(const LlmDatadistEvent *event, const char *text) {
  return event->message_size == strlen(text) && memcmp(event->message, text, event->message_size) == 0;
}

static void say(const Node *node, uint64_t peer, const void *bytes, size_t size) {
  CHECK_STATUS(llm_datadist_send(node->engine, peer, bytes, size), LLM_DATADIST_SUCCESS);
}

/* -- the second process --------------------------------------------------------------------------------------------- */

/* Answers one message: "check BLOCK SEED FROM", or "echo" */
static void answer(const Node *node, const LlmDatadistEvent *event) {
  char text[128] = {0};
  int block = 0;
  int seed = 0;
  int from = 0;
  CHECK(event->message_size < sizeof(text));
  memcpy(text, event->message, event->message_size);
  if (sscanf(text, "check %d %d %d", &block, &seed, &from) == 3) {
    const char *found = has(node, block, seed, from) ? "good" : "bad";
    say(node, event->peer.peer, found, strlen(found));
  } else {
    say(node, event->peer.peer, event->message, event->message_size);
  }
}

static void serve(const char *transport, int out, int in) {
  Node node;
  char address[LLM_DATADIST_ADDRESS_SIZE + 1] = {0};
  open_node(&node, "owner", transport, "127.0.0.1:0");
  fill(&node, 7);
  CHECK_STATUS(llm_datadist_engine_address(node.engine, address, LLM_DATADIST_ADDRESS_SIZE), LLM_DATADIST_SUCCESS);
  strcat(address, "\n");
  CHECK(write(out, address, strlen(address)) == (ssize_t)strlen(address));
  for (;;) {
    struct pollfd waited[] = {{node.descriptor, POLLIN, 0}, {in, POLLIN, 0}};
    LlmDatadistEvent events[MAX_EVENTS];
    size_t count = 0;
    CHECK(poll(waited, 2, -1) > 0);
    if (waited[1].revents != 0) {
      break;
    }
    CHECK_STATUS(llm_datadist_events(node.engine, MAX_EVENTS, events, &count), LLM_DATADIST_SUCCESS);
    for (size_t at = 0; at < count; ++at) {
      if (events[at].kind == LLM_DATADIST_MESSAGE) {
        answer(&node, &events[at]);
      }
    }
  }
  CHECK_STATUS(llm_datadist_engine_close(node.engine, 0.0), LLM_DATADIST_SUCCESS);
}

typedef struct {
  pid_t process;
  char address[LLM_DATADIST_ADDRESS_SIZE + 1];
  int in;
} Owner;

static Owner start_owner(const char *program, const char *transport) {
  Owner owner = {0};
  int out[2];
  int in[2];
  CHECK(pipe(out) == 0 && pipe(in) == 0);
  owner.process = fork();
  if (owner.process == 0) {
    CHECK(prctl(PR_SET_PDEATHSIG, SIGKILL) == 0); /* also if a check fails */
    CHECK(dup2(out[1], 1) == 1 && dup2(in[0], 0) == 0);
    execl(program, program, "serve", transport, (char *)NULL);
    _exit(3);
  }
  CHECK(owner.process > 0);
  (void)close(out[1]);
  (void)close(in[0]);
  owner.in = in[1];
  size_t length = 0;
  while (length == 0 || owner.address[length - 1] != '\n') {
    CHECK(length < sizeof(owner.address) && read(out[0], owner.address + length, 1) == 1);
    ++length;
  }
  owner.address[length - 1] = '\0';
  (void)close(out[0]);
  return owner;
}

static void end_owner(Owner *owner) {
  (void)kill(owner->process, SIGKILL);
  (void)waitpid(owner->process, NULL, 0);
  (void)close(owner->in);
}

/* -- the first process ---------------------------------------------------------------------------------------------- */

static uint64_t link_to(const Node *node, const char *address) {
  uint64_t transfer = 0;
  uint64_t peer = 0;
  CHECK_STATUS(llm_datadist_link(node->engine, address, NULL, LONG, &transfer), LLM_DATADIST_SUCCESS);
  CHECK_STATUS(llm_datadist_transfer_wait(transfer, LONG), LLM_DATADIST_SUCCESS);
  CHECK_STATUS(llm_datadist_transfer_peer(transfer, &peer), LLM_DATADIST_SUCCESS);
  CHECK_STATUS(llm_datadist_transfer_free(transfer), LLM_DATADIST_SUCCESS);
  return peer;
}

/* Rows of `count` blocks from `first` on. The list is valid for the life of the program. */
static LlmDatadistRows rows_of(uint64_t cache, uint64_t peer, const char *name, uint32_t first, size_t count) {
  static uint32_t all[BLOCKS];
  for (uint32_t block = 0; block < BLOCKS; ++block) {
    all[block] = block;
  }
  const LlmDatadistRows rows = {.cache = cache, .peer = peer, .name = name, .blocks = all + first, .num_blocks = count};
  return rows;
}

/* The outcome of a transfer, whose handle is freed. */
static uint32_t outcome(uint64_t transfer) {
  const uint32_t status = llm_datadist_transfer_wait(transfer, LONG);
  CHECK(llm_datadist_transfer_done(transfer));
  CHECK_STATUS(llm_datadist_transfer_free(transfer), LLM_DATADIST_SUCCESS);
  return status;
}

static void test_pulls(const Node *node, uint64_t peer) {
  fill(node, 1);
  const LlmDatadistPair pairs[] = {
      {.dst = rows_of(node->cache, 0, NULL, 2, 3), .src = rows_of(0, peer, "kv", 9, 3)},
      {.dst = rows_of(node->cache, 0, NULL, 8, 1), .src = rows_of(0, peer, "kv", 0, 1)},
  };
  uint64_t transfer = 0;
  CHECK_STATUS(llm_datadist_pull(node->engine, pairs, 2, NULL, &transfer), LLM_DATADIST_SUCCESS);
  CHECK_STATUS(outcome(transfer), LLM_DATADIST_SUCCESS);
  for (int block = 0; block < BLOCKS; ++block) {
    const int pulled = (block >= 2 && block < 5) || block == 8;
    CHECK(has(node, block, pulled ? 7 : 1, block == 8 ? 0 : pulled ? block + 7 : block));
  }
  /* One layer of two blocks, to another layer. */
  LlmDatadistPair part = {.dst = rows_of(node->cache, 0, NULL, 12, 2), .src = rows_of(0, peer, "kv", 4, 2)};
  part.dst.layers = part.src.layers = (LlmDatadistRange){1, 2};
  CHECK_STATUS(llm_datadist_pull(node->engine, &part, 1, NULL, &transfer), LLM_DATADIST_SUCCESS);
  CHECK_STATUS(outcome(transfer), LLM_DATADIST_SUCCESS);
  CHECK(has_layers(node, 12, 1, 12, 0, 1) && has_layers(node, 12, 7, 4, 1, 2) && has_layers(node, 13, 1, 13, 2, 3));
  part.src.name = "other";
  CHECK_STATUS(llm_datadist_pull(node->engine, &part, 1, NULL, &transfer), LLM_DATADIST_SUCCESS);
  CHECK_STATUS(outcome(transfer), LLM_DATADIST_NOT_FOUND);
  CHECK(strcmp(llm_datadist_last_error_code(), "not_found") == 0);
}

static void test_pushes(const Node *node, uint64_t peer) {
  fill(node, 2);
  const LlmDatadistPair pair = {.dst = rows_of(0, peer, "kv", 14, 1), .src = rows_of(node->cache, 0, NULL, 6, 1)};
  const char *notice = "check 14 2 6";
  LlmDatadistCall call = {.message = (const uint8_t *)notice, .message_size = strlen(notice)};
  uint64_t transfer = 0;
  CHECK_STATUS(llm_datadist_push(node->engine, &pair, 1, &call, &transfer), LLM_DATADIST_SUCCESS);
  CHECK_STATUS(outcome(transfer), LLM_DATADIST_SUCCESS);
  LlmDatadistEvent event = next_of_kind(node, LLM_DATADIST_MESSAGE);
  CHECK(says(&event, "good"));

  fill(node, 3);
  call.flags = LLM_DATADIST_LAYERWISE;
  notice = "check 14 3 6";
  call.message = (const uint8_t *)notice;
  CHECK_STATUS(llm_datadist_push(node->engine, &pair, 1, &call, &transfer), LLM_DATADIST_SUCCESS);
  for (uint32_t layer = LAYERS; layer > 0; --layer) {
    CHECK_STATUS(llm_datadist_transfer_result(transfer), LLM_DATADIST_RUNNING);
    CHECK_STATUS(llm_datadist_transfer_ready(transfer, layer - 1), LLM_DATADIST_SUCCESS);
  }
  CHECK_STATUS(outcome(transfer), LLM_DATADIST_SUCCESS);
  event = next_of_kind(node, LLM_DATADIST_MESSAGE);
  CHECK(says(&event, "good"));
}

static void both(const char *program, const char *transport) {
  Owner owner = start_owner(program, transport);
  Node node;
  open_node(&node, "reader", transport, NULL);
  const uint64_t peer = link_to(&node, owner.address);
  const LlmDatadistEvent event = next_of_kind(&node, LLM_DATADIST_PEER_UP);
  CHECK(event.peer.peer == peer && strcmp(event.peer.name, "owner") == 0);
  CHECK(strcmp(event.peer.address, owner.address) == 0);
  test_pulls(&node, peer);
  test_pushes(&node, peer);
  CHECK_STATUS(llm_datadist_engine_close(node.engine, LONG), LLM_DATADIST_SUCCESS);
  end_owner(&owner);
  puts("done");
}

static void pull_from(const char *address) {
  Node node;
  open_node(&node, "reader", "auto", NULL);
  const uint64_t peer = link_to(&node, address);
  const LlmDatadistPair pair = {.dst = rows_of(node.cache, 0, NULL, 0, 1), .src = rows_of(0, peer, "kv", 3, 1)};
  const LlmDatadistCall call = {.message = (const uint8_t *)"pulled", .message_size = 6, .verify = "full"};
  uint64_t transfer = 0;
  CHECK_STATUS(llm_datadist_pull(node.engine, &pair, 1, &call, &transfer), LLM_DATADIST_SUCCESS);
  CHECK_STATUS(outcome(transfer), LLM_DATADIST_SUCCESS);
  for (int tensor = 0; tensor < TENSORS; ++tensor) {
    for (int at = 0; at < BLOCK; ++at) {
      printf("%02x", node.tensors[tensor][at]);
    }
  }
  puts("");
  CHECK_STATUS(llm_datadist_peer_close(node.engine, peer, LONG, &transfer), LLM_DATADIST_SUCCESS);
  CHECK_STATUS(outcome(transfer), LLM_DATADIST_SUCCESS);
  CHECK_STATUS(llm_datadist_engine_close(node.engine, LONG), LLM_DATADIST_SUCCESS);
}

int main(int argc, char **argv) {
  CHECK(argc == 3);
  CHECK(llm_datadist_abi_version() >= LLM_DATADIST_ABI_VERSION);
  if (strcmp(argv[1], "serve") == 0) {
    serve(argv[2], 1, 0);
  } else if (strcmp(argv[1], "pull") == 0) {
    pull_from(argv[2]);
  } else {
    both(argv[0], argv[2]);
  }
  return 0;
}
