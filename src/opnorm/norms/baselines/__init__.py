"""Published methods, by author and year, written from the papers: what they say, for what, and what it costs.

N inputs and k taps an axis, d axes, C channels, T steps. "Plane" means: every zero padding, circular padding of at most
e-1 in all, any stride, dilation and groups, transposed, any input size.

| method | supports | guarantee | cost |
| --- | --- | --- | --- |
| `Runkel2021` | depthwise; pointwise, linear | upper; lower | an FFT of (N+k-1)^d a channel; T products with C × C |
| `Miyato2018` | everything | none; lower for matrices | T products with the C_out × (C_in k^d) kernel |
| `Sedghi2019` | plane, with a size | exact or upper if circular, else none | N^d SVDs of C × C |
| `Tsuzuku2018` | plane | upper | one SVD of C_out × (C_in k^d) |
| `Singla2021` | plane | upper | 2^d SVDs of the reshaped kernel |
| `Araujo2021` | plane | upper if corrected | C² FFTs of 50^d |
| `Ryu2019` | everything, with a size | lower | 100 passes forward and back through the layer |
| `Farnia2018` | everything, with a size | lower | one pass forward and back; stores C_in N^d numbers |
| `Delattre2023` | plane, with a size | upper if circular, else none | N^d times T products of C × C |
| `Delattre2024` | plane | upper | (2^T k)^d times T products of C × C |
| `Prach2022` | plane | upper | (2k)^d products of C × C |
| `Grishina2024` | plane | none: a maximum approached from below | T times d+2 contractions of the kernel |
"""

from opnorm.norms.baselines.araujo2021 import Araujo2021
from opnorm.norms.baselines.delattre2023 import Delattre2023
from opnorm.norms.baselines.delattre2024 import Delattre2024
from opnorm.norms.baselines.farnia2018 import Farnia2018
from opnorm.norms.baselines.grishina2024 import Grishina2024
from opnorm.norms.baselines.miyato2018 import Miyato2018
from opnorm.norms.baselines.prach2022 import Prach2022
from opnorm.norms.baselines.runkel2021 import Runkel2021
from opnorm.norms.baselines.ryu2019 import Ryu2019
from opnorm.norms.baselines.sedghi2019 import Sedghi2019
from opnorm.norms.baselines.singla2021 import Singla2021
from opnorm.norms.baselines.tsuzuku2018 import Tsuzuku2018

__all__ = [
    "Araujo2021",
    "Delattre2023",
    "Delattre2024",
    "Farnia2018",
    "Grishina2024",
    "Miyato2018",
    "Prach2022",
    "Runkel2021",
    "Ryu2019",
    "Sedghi2019",
    "Singla2021",
    "Tsuzuku2018",
]
