from .spectra import SpectralReport as SpectralReport
from .spectra import effective_rank as effective_rank
from .spectra import marchenko_pastur_edges as marchenko_pastur_edges
from .spectra import spectral_report as spectral_report
from .spectra import stable_rank as stable_rank
from .variance import VarianceReport as VarianceReport
from .variance import variance_report as variance_report
