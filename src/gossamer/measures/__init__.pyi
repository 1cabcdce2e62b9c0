from .variance import VarianceReport as VarianceReport
from .variance import variance_report as variance_report
