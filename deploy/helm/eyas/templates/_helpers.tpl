{{- define "eyas.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "eyas.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "eyas.labels" -}}
{{ include "eyas.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "eyas.image" -}}
{{- $suffix := ternary "-cuda" "-cpu" (gt (int .Values.gpu.count) 0) -}}
{{- printf "%s:%s" .Values.image.repository (default (printf "%s%s" .Chart.AppVersion $suffix) .Values.image.tag) -}}
{{- end -}}

{{- define "eyas.secret" -}}
{{- if .Values.apiKeys.existingSecret -}}
{{- .Values.apiKeys.existingSecret -}}
{{- else if .Values.apiKeys.values -}}
{{- include "eyas.name" . -}}-api-keys
{{- end -}}
{{- end -}}
