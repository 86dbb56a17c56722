// The kernels for AMX beside AVX-512 with VNNI: 16 rows and more by tiles, fewer as without.
#include "vnni.h"

#include "tiles.h"

#define FORM amx
#include "kernels.h"
