/* What this machine can do: copy loops as a careful person writes them by hand, over a list of (source, destination).
 *
 * Built and called by limit.py. Not for: anything the library uses.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

struct move {
    uint64_t src, dst;
};

enum kernel { PLAIN, STREAM, STREAM4, AHEAD, AHEAD4, KERNELS };

#if defined(__x86_64__)
#define AVX2 __attribute__((target("avx2")))

AVX2 static inline void stream128(char *dst, const char *src) {
    __m256i a = _mm256_loadu_si256((const __m256i *)src);
    __m256i b = _mm256_loadu_si256((const __m256i *)(src + 32));
    __m256i c = _mm256_loadu_si256((const __m256i *)(src + 64));
    __m256i d = _mm256_loadu_si256((const __m256i *)(src + 96));
    _mm256_stream_si256((__m256i *)dst, a);
    _mm256_stream_si256((__m256i *)(dst + 32), b);
    _mm256_stream_si256((__m256i *)(dst + 64), c);
    _mm256_stream_si256((__m256i *)(dst + 96), d);
}

/* One block, from its beginning to its end. */
AVX2 static void stream(char *dst, const char *src, size_t len) {
    for (size_t at = 0; at < len; at += 128) stream128(dst + at, src + at);
}

/* Four quarters of a block advance together, so that several pages are under way at once. */
AVX2 static void stream4(char *dst, const char *src, size_t len) {
    size_t quarter = len / 4;
    for (size_t at = 0; at < quarter; at += 128)
        for (size_t part = 0; part < 4; part++) stream128(dst + part * quarter + at, src + part * quarter + at);
}

/* The source is asked for 1 KiB ahead, and beyond the end of a block in the next one. */
AVX2 static void ahead(char *dst, const char *src, size_t len, const char *next) {
    const size_t distance = 1024;
    for (size_t at = 0; at < len; at += 128) {
        const char *soon = at + distance < len ? src + at + distance : next + (at + distance - len);
        _mm_prefetch(soon, _MM_HINT_NTA);
        _mm_prefetch(soon + 64, _MM_HINT_NTA);
        stream128(dst + at, src + at);
    }
}

/* Four lanes advance together, each asked for 256 bytes ahead, and beyond its end in the lanes that come next. */
AVX2 static void four_streams(char *const dst[4], const char *const src[4], size_t len, const char *const next[4]) {
    const size_t distance = 256;
    for (size_t at = 0; at < len; at += 128)
        for (size_t part = 0; part < 4; part++) {
            const char *soon = at + distance < len ? src[part] + at + distance : next[part] + (at + distance - len);
            _mm_prefetch(soon, _MM_HINT_NTA);
            _mm_prefetch(soon + 64, _MM_HINT_NTA);
            stream128(dst[part] + at, src[part] + at);
        }
}
#define FENCE() _mm_sfence()
#else
static void stream(char *dst, const char *src, size_t len) { memcpy(dst, src, len); }
static void stream4(char *dst, const char *src, size_t len) { memcpy(dst, src, len); }
static void ahead(char *dst, const char *src, size_t len, const char *next) {
    (void)next;
    memcpy(dst, src, len);
}
static void four_streams(char *const dst[4], const char *const src[4], size_t len, const char *const next[4]) {
    (void)next;
    for (size_t part = 0; part < 4; part++) memcpy(dst[part], src[part], len);
}
#define FENCE()
#endif

/* Four pages at a time: the quarters of a block, or four blocks where a block is short. */
#define SHORT (16u << 10)

static size_t ahead4(const struct move *moves, size_t count, size_t len, const struct move *after) {
    size_t step = len < SHORT ? 4 : 1, part = len * step / 4, done = 0;
    for (; done + step <= count; done += step) {
        char *dst[4];
        const char *src[4], *next[4];
        for (size_t i = 0; i < 4; i++) {
            size_t block = done + i * step / 4, skip = step == 4 ? 0 : i * part;
            const struct move *then = block + step < count ? moves + block + step : step == 1 ? after : NULL;
            dst[i] = (char *)moves[block].dst + skip;
            src[i] = (const char *)moves[block].src + skip;
            next[i] = then != NULL ? (const char *)then->src + skip : src[i];
        }
        four_streams(dst, src, part, next);
    }
    return done; /* up to three short blocks are left */
}

/* Blocks of one length, with one kernel; `after` is the block that somebody copies next, or NULL. */
static void blocks(const struct move *moves, size_t count, size_t len, int kernel, const struct move *after) {
    size_t at = kernel == AHEAD4 ? ahead4(moves, count, len, after) : 0;
    for (; at < count; at++) {
        char *dst = (char *)moves[at].dst;
        const char *src = (const char *)moves[at].src;
        switch (kernel) {
        case PLAIN: memcpy(dst, src, len); break;
        case STREAM4: stream4(dst, src, len); break;
        case AHEAD: {
            const struct move *next = at + 1 < count ? moves + at + 1 : after;
            ahead(dst, src, len, next != NULL ? (const char *)next->src : src);
            break;
        }
        default: stream(dst, src, len);
        }
    }
    if (kernel != PLAIN) FENCE();
}

#define MAX_THREADS 64
/* What a thread takes at a time: whoever is through with it takes the next, so that none waits for a slower one. */
#define CHUNK (512u << 10)

/* A copy that several threads are at. */
struct job {
    const struct move *moves;
    size_t count, len;
    size_t chunk; /* blocks, or bytes of one block where `split` */
    int kernel, split;
    _Atomic size_t next; /* the first chunk that nobody has */
};

/* Takes several blocks. */
static int some_blocks(struct job *job) {
    size_t from = atomic_fetch_add(&job->next, 1) * job->chunk;
    if (from >= job->count) return 0;
    size_t to = from + job->chunk < job->count ? from + job->chunk : job->count;
    blocks(job->moves + from, to - from, job->len, job->kernel, to < job->count ? job->moves + to : NULL);
    return 1;
}

/* Takes a piece of one block. */
static int one_piece(struct job *job) {
    size_t pieces = (job->len + job->chunk - 1) / job->chunk, mine = atomic_fetch_add(&job->next, 1);
    if (mine / pieces >= job->count) return 0;
    size_t from = mine % pieces * job->chunk, left = job->len - from;
    const struct move *block = job->moves + mine / pieces;
    struct move piece = {block->src + from, block->dst + from};
    blocks(&piece, 1, left < job->chunk ? left : job->chunk, job->kernel, NULL);
    return 1;
}

static void *copy_chunks(void *argument) {
    struct job *job = argument;
    while (job->split ? one_piece(job) : some_blocks(job)) {}
    return NULL;
}

/* What one thread compares or overwrites. */
struct share {
    const struct move *moves;
    size_t count, len;
    int kernel;
};

static void *same_share(void *argument) {
    struct share *share = argument;
    for (size_t at = 0; at < share->count; at++)
        if (memcmp((const void *)share->moves[at].src, (const void *)share->moves[at].dst, share->len) != 0) {
            share->kernel = -1; /* found: where is in len */
            share->len = at;
            return NULL;
        }
    return NULL;
}

static void *poison_share(void *argument) {
    const struct share *share = argument;
    for (size_t at = 0; at < share->count; at++) memset((void *)share->moves[at].dst, share->kernel, share->len);
    return NULL;
}

/* Runs `work` over equal shares, the first in this thread. */
static void in_threads(void *(*work)(void *), struct share *shares, const struct move *moves, size_t count, size_t len,
                       int kernel, int threads) {
    pthread_t ids[MAX_THREADS];
    int started[MAX_THREADS] = {0};
    size_t each = (count + (size_t)threads - 1) / (size_t)threads;
    for (int t = 0; t < threads; t++) {
        size_t from = each * (size_t)t < count ? each * (size_t)t : count;
        size_t to = from + each < count ? from + each : count;
        shares[t] = (struct share){moves + from, to - from, len, kernel};
        if (t > 0) started[t] = pthread_create(&ids[t], NULL, work, &shares[t]) == 0;
    }
    work(&shares[0]);
    for (int t = 1; t < threads; t++) {
        if (started[t])
            pthread_join(ids[t], NULL);
        else
            work(&shares[t]);
    }
}

/* The same work in several threads, of which this is one; each takes what the others have not. */
static void run_in(int threads, void *(*work)(void *), void *job) {
    pthread_t ids[MAX_THREADS];
    int started[MAX_THREADS] = {0};
    for (int t = 1; t < threads; t++) started[t] = pthread_create(&ids[t], NULL, work, job) == 0;
    work(job);
    for (int t = 1; t < threads; t++)
        if (started[t]) pthread_join(ids[t], NULL);
}

/* Copies `count` blocks of `len` bytes (a multiple of 512, aligned to 32) with one kernel. */
int limit_copy(const struct move *moves, size_t count, size_t len, int kernel, int threads) {
    if (threads < 1 || threads > MAX_THREADS || kernel < 0 || kernel >= KERNELS || len == 0 || len % 512 != 0) return EINVAL;
    size_t fair = (count * len + (size_t)threads - 1) / (size_t)threads; /* of few bytes everybody gets some */
    size_t chunk = fair < CHUNK ? fair : CHUNK;
    int split = threads > 1 && chunk < len;
    chunk = split ? (chunk + 511) / 512 * 512 : chunk / len > 0 ? chunk / len : 1;
    struct job job = {moves, count, len, chunk, kernel, split, 0};
    run_in(threads, copy_chunks, &job);
    return 0;
}

/* Index of a block that is not equal on both sides, or -1. */
int64_t limit_differs(const struct move *moves, size_t count, size_t len, int threads) {
    struct share shares[MAX_THREADS];
    if (threads < 1 || threads > MAX_THREADS) return 0;
    in_threads(same_share, shares, moves, count, len, 0, threads);
    for (int t = 0; t < threads; t++)
        if (shares[t].kernel == -1) return (int64_t)(shares[t].moves - moves) + (int64_t)shares[t].len;
    return -1;
}

/* Overwrites every destination. */
int limit_poison(const struct move *moves, size_t count, size_t len, int byte, int threads) {
    struct share shares[MAX_THREADS];
    if (threads < 1 || threads > MAX_THREADS) return EINVAL;
    in_threads(poison_share, shares, moves, count, len, byte, threads);
    return 0;
}

/* A copy by the kernel that several threads are at. */
struct remote_job {
    int pid, write;
    const struct move *moves;
    size_t count, len, a_call;
    _Atomic size_t next; /* the first block that nobody has */
    _Atomic int wrong;   /* an errno, or 0 */
};

/* One system call: `a_call` blocks. */
static int vm_call(const struct remote_job *job, size_t at) {
    struct iovec local[1024], remote[1024];
    size_t now = job->count - at < job->a_call ? job->count - at : job->a_call;
    for (size_t i = 0; i < now; i++) {
        const struct move *move = job->moves + at + i;
        local[i] = (struct iovec){(void *)(job->write ? move->src : move->dst), job->len};
        remote[i] = (struct iovec){(void *)(job->write ? move->dst : move->src), job->len};
    }
    ssize_t moved = job->write ? process_vm_writev(job->pid, local, now, remote, now, 0)
                               : process_vm_readv(job->pid, local, now, remote, now, 0);
    if (moved < 0) return errno;
    return (size_t)moved == now * job->len ? 0 : EIO; /* two GiB and more in one call: ask for fewer blocks a call */
}

static void *vm_calls(void *argument) {
    struct remote_job *job = argument;
    for (size_t at; (at = atomic_fetch_add(&job->next, job->a_call)) < job->count && job->wrong == 0;) {
        int wrong = vm_call(job, at);
        if (wrong != 0) job->wrong = wrong;
    }
    return NULL;
}

/* The same copy by the kernel out of (or into) another process, at most `a_call` blocks a system call; an errno, or 0.
 * `src` and `dst` are as in the list: for a write the destinations are the other process's addresses. */
int limit_vm(int pid, const struct move *moves, size_t count, size_t len, size_t a_call, int write, int threads) {
    if (a_call < 1 || a_call > 1024 || threads < 1 || threads > MAX_THREADS) return EINVAL;
    size_t fair = (count + (size_t)threads - 1) / (size_t)threads;
    struct remote_job job = {pid, write, moves, count, len, fair > 0 && fair < a_call ? fair : a_call, 0, 0};
    run_in(threads, vm_calls, &job);
    return job.wrong;
}

/* Makes huge pages of a touched range: 0, or an errno where the kernel will not. */
int limit_collapse(void *address, size_t len) {
    const size_t huge = 2u << 20;
    uintptr_t from = ((uintptr_t)address + huge - 1) / huge * huge;
    uintptr_t to = ((uintptr_t)address + len) / huge * huge;
    if (from >= to) return 0;
    return madvise((void *)from, to - from, 25 /* MADV_COLLAPSE */) == 0 ? 0 : errno;
}
