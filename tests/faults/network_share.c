// Preloaded, it makes every file system one that neither syncs a folder nor locks a file, as some
// network shares.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <sys/stat.h>

int fsync(int descriptor) {
  struct stat about;
  if (fstat(descriptor, &about) == 0 && S_ISDIR(about.st_mode)) {
    errno = EINVAL;
    return -1;
  }
  int (*sync_file)(int) = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
  return sync_file(descriptor);
}

int flock(int descriptor, int operation) {
  errno = ENOLCK;
  return -1;
}
