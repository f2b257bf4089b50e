// Makes calls of the C library fail, or take long, for paths below one directory.  Loaded with LD_PRELOAD.
//
// FILE_FAULTS_BELOW    the directory
// FILE_FAULTS          rules "operation first last action number", separated by semicolons; see __init__.py
// FILE_FAULTS_SEED     for actions with a probability
// FILE_FAULTS_JOURNAL  a file to which each injected fault is appended: "seconds operation action"

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { WRITE, FSYNC, OPEN, MKDIR, FTRUNCATE, RENAME, FSTAT, UNLINK, OPERATIONS };
static const char *const NAMES[] = {"write", "fsync", "open", "mkdir", "ftruncate", "rename", "fstat", "unlink"};
enum { FAIL, STALL, SHORT, TORN, LOSE };
static const char *const ACTIONS[] = {"fail", "stall", "short", "torn", "lose"};

#define MOST 64
struct rule { int operation, action; long first, last; double probability, number; };
struct synced { dev_t device; ino_t inode; off_t size; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static char below[4096];
static struct rule rules[MOST];
static struct synced files[4096];
static int rule_count, file_count, journal = -1;
static long calls[OPERATIONS];
static unsigned long long random_state;

static ssize_t (*real_write)(int, const void *, size_t);
static int (*real_fsync)(int), (*real_fdatasync)(int), (*real_ftruncate)(int, off_t);
static int (*real_open)(const char *, int, ...), (*real_openat)(int, const char *, int, ...);
static int (*real_mkdir)(const char *, mode_t), (*real_mkdirat)(int, const char *, mode_t);
static int (*real_rename)(const char *, const char *), (*real_fstat)(int, struct stat *), (*real_unlink)(const char *);

static int find(const char *const *names, int count, const char *name) {
    for (int i = 0; i < count; i++) if (!strcmp(names[i], name)) return i;
    fprintf(stderr, "file faults: unknown name %s\n", name);
    abort();
}

static void start(void);

// Read the environment again, in a forked child.
void file_faults_restart(void) {
    pthread_once(&once, start);
    if (journal >= 0) close(journal);
    journal = -1, rule_count = file_count = 0, below[0] = 0;
    memset(calls, 0, sizeof calls);
    start();
}

static void start(void) {
    real_write = dlsym(RTLD_NEXT, "write");
    real_fsync = dlsym(RTLD_NEXT, "fsync");
    real_fdatasync = dlsym(RTLD_NEXT, "fdatasync");
    real_ftruncate = dlsym(RTLD_NEXT, "ftruncate64");
    real_open = dlsym(RTLD_NEXT, "open64");
    real_openat = dlsym(RTLD_NEXT, "openat64");
    real_mkdir = dlsym(RTLD_NEXT, "mkdir");
    real_mkdirat = dlsym(RTLD_NEXT, "mkdirat");
    real_rename = dlsym(RTLD_NEXT, "rename");
    real_fstat = dlsym(RTLD_NEXT, "fstat64");
    real_unlink = dlsym(RTLD_NEXT, "unlink");
    const char *directory = getenv("FILE_FAULTS_BELOW"), *text = getenv("FILE_FAULTS");
    const char *seed = getenv("FILE_FAULTS_SEED"), *path = getenv("FILE_FAULTS_JOURNAL");
    random_state = 0x9e3779b97f4a7c15ull ^ (seed ? strtoull(seed, NULL, 10) * 0xbf58476d1ce4e5b9ull : 0);
    if (path) journal = real_open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (!directory || !text) return;
    snprintf(below, sizeof below, "%s/", directory);
    char operation[32], action[32];
    int used;
    for (; rule_count < MOST; text += used) {
        struct rule *rule = &rules[rule_count];
        if (sscanf(text, "%31s %ld %ld %lf %31s %lf ;%n", operation, &rule->first, &rule->last, &rule->probability, action,
                   &rule->number, &used) != 6) break;
        rule->operation = find(NAMES, OPERATIONS, operation);
        rule->action = find(ACTIONS, 5, action);
        rule_count++;
    }
}

static double chance(void) {  // splitmix64
    unsigned long long z = random_state += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return (double)((z ^ (z >> 31)) >> 11) / 9007199254740992.0;
}

static int is_below(const char *path) {
    char whole[8192];
    if (path[0] != '/') {
        if (!getcwd(whole, 4096)) return 0;
        strcat(whole, "/");
        strncat(whole, path, 4000);
        path = whole;
    }
    return below[0] && !strncmp(path, below, strlen(below));
}

static int path_of(int descriptor, char *path, size_t size) {
    char name[64];
    snprintf(name, sizeof name, "/proc/self/fd/%d", descriptor);
    const ssize_t length = readlink(name, path, size - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return 1;
}

static int is_of(int descriptor) {
    char path[4096];
    const int before = errno, found = below[0] && path_of(descriptor, path, sizeof path) && is_below(path);
    errno = before;
    return found;
}

// Count a call, and return the rule that applies to it.
static const struct rule *next(int operation) {
    const struct rule *found = NULL;
    pthread_mutex_lock(&lock);
    const long call = ++calls[operation];
    for (int i = 0; i < rule_count && !found; i++) {
        const struct rule *rule = &rules[i];
        if (rule->operation == operation && rule->first <= call && call <= rule->last && chance() < rule->probability)
            found = rule;
    }
    if (found && journal >= 0) {
        struct timespec now;
        char line[128];
        clock_gettime(CLOCK_MONOTONIC, &now);
        const int length = snprintf(line, sizeof line, "%ld.%09ld %s %s\n", (long)now.tv_sec, now.tv_nsec,
                                    NAMES[operation], ACTIONS[found->action]);
        if (real_write(journal, line, length) != length) abort();
    }
    pthread_mutex_unlock(&lock);
    if (found && found->action == STALL) {
        struct timespec pause = {(time_t)found->number, (long)((found->number - (long)found->number) * 1e9)};
        nanosleep(&pause, NULL);
        return NULL;
    }
    return found;
}

// Whether a call fails; for operations that either succeed or fail.
static int fails(int operation) {
    const struct rule *rule = next(operation);
    if (rule) errno = (int)rule->number;
    return rule != NULL;
}

static struct synced *synced_of(int descriptor, struct stat *status) {
    if (real_fstat(descriptor, status)) return NULL;
    for (int i = 0; i < file_count; i++)
        if (files[i].device == status->st_dev && files[i].inode == status->st_ino) return &files[i];
    if (file_count == 4096) return NULL;
    files[file_count] = (struct synced){status->st_dev, status->st_ino, 0};
    return &files[file_count++];
}

static int synchronise(int descriptor, int (*real)(int)) {
    if (!is_of(descriptor)) return real(descriptor);
    const struct rule *rule = next(FSYNC);
    struct stat status;
    pthread_mutex_lock(&lock);
    struct synced *known = synced_of(descriptor, &status);
    if (rule && rule->action == LOSE && known && S_ISREG(status.st_mode)) {  // the pages that were not written are zeros
        if (known->size < status.st_size) {
            real_ftruncate(descriptor, known->size);
            real_ftruncate(descriptor, status.st_size);
        }
    }
    pthread_mutex_unlock(&lock);
    if (rule) {
        errno = (int)rule->number;
        return -1;
    }
    const int result = real(descriptor);
    if (!result && known) known->size = status.st_size;
    return result;
}

int fsync(int descriptor) {
    pthread_once(&once, start);
    return synchronise(descriptor, real_fsync);
}

int fdatasync(int descriptor) {
    pthread_once(&once, start);
    return synchronise(descriptor, real_fdatasync);
}

ssize_t write(int descriptor, const void *data, size_t size) {
    pthread_once(&once, start);
    if (!is_of(descriptor)) return real_write(descriptor, data, size);
    const struct rule *rule = next(WRITE);
    if (!rule) return real_write(descriptor, data, size);
    if (rule->action == SHORT) return real_write(descriptor, data, size / 2);
    if (rule->action == TORN && real_write(descriptor, data, size / 2) < 0) return -1;
    errno = (int)rule->number;
    return -1;
}

int ftruncate(int descriptor, off_t size) {
    pthread_once(&once, start);
    if (is_of(descriptor) && fails(FTRUNCATE)) return -1;
    return real_ftruncate(descriptor, size);
}

int ftruncate64(int descriptor, off_t size) { return ftruncate(descriptor, size); }

int open(const char *path, int flags, ...) {
    pthread_once(&once, start);
    va_list arguments;
    va_start(arguments, flags);
    const mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(arguments, mode_t) : 0;
    va_end(arguments);
    if (is_below(path) && fails(OPEN)) return -1;
    return real_open(path, flags, mode);
}

int openat(int directory, const char *path, int flags, ...) {
    pthread_once(&once, start);
    va_list arguments;
    va_start(arguments, flags);
    const mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(arguments, mode_t) : 0;
    va_end(arguments);
    if (path[0] == '/' && is_below(path) && fails(OPEN)) return -1;
    return real_openat(directory, path, flags, mode);
}

int open64(const char *path, int flags, ...) __attribute__((alias("open")));
int openat64(int directory, const char *path, int flags, ...) __attribute__((alias("openat")));

int mkdir(const char *path, mode_t mode) {
    pthread_once(&once, start);
    if (is_below(path) && fails(MKDIR)) return -1;
    return real_mkdir(path, mode);
}

int mkdirat(int directory, const char *path, mode_t mode) {
    pthread_once(&once, start);
    if (path[0] == '/' && is_below(path) && fails(MKDIR)) return -1;
    return real_mkdirat(directory, path, mode);
}

int rename(const char *path, const char *target) {
    pthread_once(&once, start);
    return is_below(path) && fails(RENAME) ? -1 : real_rename(path, target);
}

int fstat(int descriptor, struct stat *status) {
    pthread_once(&once, start);
    return is_of(descriptor) && fails(FSTAT) ? -1 : real_fstat(descriptor, status);
}

int fstat64(int descriptor, struct stat64 *status) { return fstat(descriptor, (struct stat *)status); }

int unlink(const char *path) {
    pthread_once(&once, start);
    return is_below(path) && fails(UNLINK) ? -1 : real_unlink(path);
}
